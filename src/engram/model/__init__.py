"""A model that learns for years: its folder on disk, and everything that is done with it."""

from __future__ import annotations

from engram.model.edit import EditResult, ForgetPreview, forget, merge, preview_forget, rename, rollback
from engram.model.evidence import Evidence, evidence
from engram.model.exporting import export
from engram.model.folder import ModelFolder
from engram.model.held_out import Calibration, RejectionThreshold
from engram.model.inspection import ModelSummary, Version, inspect
from engram.model.learning import (
    ClassAccuracy,
    DoubtfulImage,
    UpdateRejected,
    UpdateResult,
    learn,
    learn_images,
    train_update,
)
from engram.model.model import Metadata, Model, settings_of, with_metadata, with_settings
from engram.model.plan import LearnOptions, UpdatePlan, expected_seconds, plan_update, plan_update_of_samples
from engram.model.prediction import (
    Answer,
    ClassProbability,
    Evaluation,
    Prediction,
    Rejection,
    UnknownClass,
    answers,
    evaluate,
    evaluate_scores,
    find_images,
    predict,
    rejection,
)
from engram.model.saving import inconsistencies, load, load_version, save, verify
from engram.model.watching import WatchEvent, watch

__all__ = ["Answer", "Calibration", "ClassAccuracy", "ClassProbability", "DoubtfulImage", "EditResult"]
__all__ += ["Evaluation", "Evidence", "ForgetPreview"]
__all__ += ["LearnOptions", "Metadata", "Model", "ModelFolder", "ModelSummary", "Prediction", "Version"]
__all__ += ["Rejection", "RejectionThreshold", "UnknownClass", "UpdatePlan", "UpdateRejected", "UpdateResult"]
__all__ += ["answers", "evaluate", "evaluate_scores", "evidence", "expected_seconds", "export", "find_images"]
__all__ += ["forget", "inconsistencies"]
__all__ += ["inspect", "learn", "learn_images", "load", "load_version", "merge", "plan_update"]
__all__ += ["plan_update_of_samples", "predict", "preview_forget", "rejection", "rename", "rollback"]
__all__ += ["save", "settings_of", "train_update", "verify", "with_metadata", "with_settings"]
__all__ += ["WatchEvent", "watch"]
