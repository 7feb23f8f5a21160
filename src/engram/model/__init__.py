"""A learner kept for years: its folder on disk, and all that is done with it."""

from __future__ import annotations

from engram.model.edit import Edited, Removal, forget, merge, removal, rename, rollback
from engram.model.evaluation import Evaluation, evaluate
from engram.model.evidence import Evidence
from engram.model.exporting import Exported, export
from engram.model.folder import ModelFolder
from engram.model.inspection import Generation, Inventory, KnownClass, Sizes, inspect
from engram.model.learning import Judgement, Learned, Taught, UpdateRejected, learn, learn_pictures, teach
from engram.model.manifest import Change, File, Manifest
from engram.model.model import (
    Adaptation,
    Calibration,
    Facts,
    Model,
    load,
    remake,
    restored,
    save,
    settings_of,
    with_facts,
)
from engram.model.plan import LearnOptions, UpdatePlan, expected_seconds, plan_update, plan_update_of_samples
from engram.model.prediction import Answer, Prediction, answer, pictures_among, predict
from engram.model.verification import Verified, contradictions, verify
from engram.model.writing import KEEP, Writer

__all__ = [
    "KEEP",
    "Adaptation",
    "Answer",
    "Calibration",
    "Change",
    "Edited",
    "Evaluation",
    "Evidence",
    "Exported",
    "Facts",
    "File",
    "Generation",
    "Inventory",
    "Judgement",
    "KnownClass",
    "LearnOptions",
    "Learned",
    "Manifest",
    "Model",
    "ModelFolder",
    "Prediction",
    "Removal",
    "Sizes",
    "Taught",
    "UpdatePlan",
    "UpdateRejected",
    "Verified",
    "Writer",
    "answer",
    "contradictions",
    "evaluate",
    "expected_seconds",
    "export",
    "forget",
    "inspect",
    "learn",
    "learn_pictures",
    "load",
    "merge",
    "pictures_among",
    "plan_update",
    "plan_update_of_samples",
    "predict",
    "remake",
    "removal",
    "rename",
    "restored",
    "rollback",
    "save",
    "settings_of",
    "teach",
    "verify",
    "with_facts",
]
