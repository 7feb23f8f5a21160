"""A learner kept for years: its folder on disk, and all that is done with it."""

from __future__ import annotations

from engram.model.edit import EditResult, ForgetPreview, forget, merge, preview_forget, rename, rollback
from engram.model.evaluation import Evaluation, evaluate
from engram.model.evidence import HeldOutCounts
from engram.model.exporting import ExportResult, export
from engram.model.folder import KEEP, ModelFolder, Writer
from engram.model.inspection import ByteCounts, ClassSummary, Generation, ModelSummary, inspect
from engram.model.learning import (
    ClassAccuracy,
    TrainedUpdate,
    UpdateRejected,
    UpdateResult,
    learn,
    learn_images,
    train_update,
)
from engram.model.manifest import Change, File, Manifest
from engram.model.model import (
    Adaptation,
    Calibration,
    Metadata,
    Model,
    load,
    remake,
    restore_model,
    save,
    settings_of,
    with_metadata,
)
from engram.model.plan import LearnOptions, UpdatePlan, expected_seconds, plan_update, plan_update_of_samples
from engram.model.prediction import ClassProbability, Prediction, find_images, predict, top_classes
from engram.model.verification import VerifyResult, inconsistencies, verify

__all__ = [
    "KEEP",
    "Adaptation",
    "ByteCounts",
    "Calibration",
    "Change",
    "ClassAccuracy",
    "ClassProbability",
    "ClassSummary",
    "EditResult",
    "Evaluation",
    "ExportResult",
    "File",
    "ForgetPreview",
    "Generation",
    "HeldOutCounts",
    "LearnOptions",
    "Manifest",
    "Metadata",
    "Model",
    "ModelFolder",
    "ModelSummary",
    "Prediction",
    "TrainedUpdate",
    "UpdatePlan",
    "UpdateRejected",
    "UpdateResult",
    "VerifyResult",
    "Writer",
    "evaluate",
    "expected_seconds",
    "export",
    "find_images",
    "forget",
    "inconsistencies",
    "inspect",
    "learn",
    "learn_images",
    "load",
    "merge",
    "plan_update",
    "plan_update_of_samples",
    "predict",
    "preview_forget",
    "remake",
    "rename",
    "restore_model",
    "rollback",
    "save",
    "settings_of",
    "top_classes",
    "train_update",
    "verify",
    "with_metadata",
]
