"""Objectives, and what is done after training, at the paper's training length on a small proxy of its network.

The proxy: ResNet-14 (d = 64) on random crops of 24 × 24 pixels, 70 epochs, the paper's rates, in bfloat16, on the
validation split of CIFAR-100 or of Tiny ImageNet 50 at 32 × 32 pixels. A task takes a few minutes of one core.

    python benchmarks/proxy.py train distillation rotation   # objectives; networks are cached in benchmarks/work/proxy
    python benchmarks/proxy.py compare distillation          # everything after training, on those networks

PROXY_DATA (cifar100 or tiny), PROXY_TASKS and PROXY_SEED choose data, tasks (3) and seed (100); PROXY_IMAGES the
training images per class (all but a tenth; with it, 50 others validate); PROXY_AFTER the rows of `compare`, separated
by semicolons. Results are added to benchmarks/results/proxy.json.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engram.data import Dataset, DecodeOptions, Samples, load
from engram.experiments import Plan
from engram.network import NETWORKS, Cache
from engram.network.registry import NetworkEntry, ResNet, _convolution

HERE = Path(__file__).parent
WORK, RESULTS = HERE / "work" / "proxy", HERE / "results" / "proxy.json"
TASKS = int(os.environ.get("PROXY_TASKS", "3"))
DATA = os.environ.get("PROXY_DATA", "cifar100")
PER_CLASS = int(os.environ.get("PROXY_IMAGES", "0"))
VALIDATION = 50 / (PER_CLASS + 50) if PER_CLASS else 0.1
IMAGES = Path(os.environ["ENGRAM_DATA"])


def resnet14(channels: int = 3, *, last_relu: bool = True) -> ResNet:
    return ResNet(_convolution(channels, 16, 3), nn.Identity(), (16, 32, 64), 2, False, last_relu)


NETWORKS["resnet14"] = NetworkEntry("ResNet-14, a proxy of ResNet-32", resnet14, 64)

PROXY: dict[str, Any] = {"network": "resnet14", "crop": 24, "pad": 0, "precision": "bfloat16"}
if DATA == "tiny":  # trained like CIFAR-100
    PROXY |= {"expected_classes": 100, "epochs": 70, "milestones": (50 / 70, 64 / 70)}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "distillation": {},
    "gamma 0": {"feature_distillation": 0.0},
    "gamma .2": {"feature_distillation": 0.2},
    "rotation": {"rotation_labels": 1.0},
    "rotation, first": {"rotation_labels": 1.0, "rotation_tasks": "first"},
    "efc 1 .1": {"objective": "efc", "elastic": 1.0, "rigid": 0.1},
    "efc .1 .1": {"objective": "efc", "elastic": 0.1, "rigid": 0.1},
    "adagauss": {"objective": "adagauss"},
    "lucir": {"objective": "lucir", "epochs": 70},
    "lucir, rotation": {"objective": "lucir", "epochs": 70, "rotation_labels": 1.0},
}
ENGRAM = {"codec": "int8", "adapter_steps": 1600, "alpha": 1e4}
AFTER: dict[str, tuple[str, dict[str, Any]]] = {
    "features": ("features", {}),
    "unadapted": ("features-unadapted", {}),
    "ridge adapter": ("features", {"adapter": "ridge"}),
    "auto adapter": ("features", {"adapter": "auto"}),
    "mlp 1600": ("features", {"adapter_steps": 1600, "alpha": 1e4}),
    "svm C 3": ("features", {"C": 3.0}),
    "softmax C 3": ("features", {"classifier": "softmax", "C": 3.0}),
    "softmax C 10": ("features", {"classifier": "softmax", "C": 10.0}),
    "softmax C 100": ("features", {"classifier": "softmax", "C": 100.0}),
    "ridge": ("features", {"classifier": "ridge"}),
    "lda": ("features", {"classifier": "lda"}),
    "fecam": ("features", {"classifier": "fecam"}),
    "int8, mlp 1600, softmax C 3": ("features", {**ENGRAM, "classifier": "softmax", "C": 3.0}),
    "500 features": ("features", {"features_per_class": 450}),
    **{name: (name, {}) for name in ("sdc", "ldc", "adc", "dpcr", "gaussian-replay")},
    "adc .05": ("adc", {"adc_step_size": 0.05}),
    "adc .15": ("adc", {"adc_step_size": 0.15}),
    "shared covariance, lda": ("sdc", {"compensation": "ridge", "covariance": "shared", "classifier": "lda"}),
    "C .3": ("features", {"C": 0.3}),
    "int8, mlp 1600": ("features", ENGRAM),
    "int8, mlp 1600, C .3": ("features", {**ENGRAM, "C": 0.3}),
    "sdc, none": ("sdc", {"compensation": "identity"}),
    "fecam, ridge": ("fecam", {"tune": "every", "compensation": "ridge"}),
}


@cache
def images() -> Dataset:
    """The data set, decoded once, or `PER_CLASS` + 50 training images of each class."""
    data = whole()
    if not PER_CLASS:
        return data
    per_class = [torch.nonzero(data.train.labels == label)[: PER_CLASS + 50, 0] for label in data.train.labels.unique()]
    return replace(data, train=data.train.select(torch.cat(per_class)))


def whole() -> Dataset:
    if DATA == "cifar100":
        return load("cifar100", IMAGES)
    files = load("tiny-imagenet-200", IMAGES / "tiny-imagenet-50", options=DecodeOptions(size=32))
    train, test = (Samples.of(part.batch(torch.arange(len(part))), part.labels) for part in (files.train, files.test))
    return replace(files, train=train, test=test)


def run(objective: str, after: str, seed: int = 100) -> dict[str, Any]:
    method, settings = AFTER[after]
    plan = Plan(
        method=method,
        preset="paper",
        settings={**PROXY, **OBJECTIVES[objective], **settings},
        classes_per_task=10,
        tasks=TASKS,
        validation=VALIDATION,
        seed=seed,
    )
    result = plan.run(images(), cache=Cache(WORK))
    numbers = {
        **{"average": result.average_incremental_accuracy, "last": result.curve[-1], "curve": result.curve},
        **{"head": result.head_curve[-1] if result.head_curve else None, "bytes": result.memory_bytes},
        "gap": result.drift_gap[-1] if result.drift_gap else None,
        "omega_previous": result.omega_previous[-1] if result.omega_previous else None,
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in numbers.items()}


def main(command: str, *objectives: str) -> None:
    seed = int(os.environ.get("PROXY_SEED", "100"))
    name = f"{DATA}, {TASKS} tasks, seed {seed}" + (f", {PER_CLASS} images per class" if PER_CLASS else "")
    compared = os.environ.get("PROXY_AFTER", ";".join(AFTER)).split(";")
    for objective in objectives:
        for after in compared if command == "compare" else ["features"]:
            found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            row = found.setdefault(name, {}).setdefault(objective, {})
            if after in row:
                continue
            row[after] = run(objective, after, seed)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
            print(objective, "|", after, row[after], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
