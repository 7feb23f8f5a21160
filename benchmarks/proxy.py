"""Objectives, and what is done after training, at the paper's training length on a small proxy of its network.

The proxy: ResNet-14 (d = 64) on random crops of 24 × 24 pixels of CIFAR-100, 70 epochs, the paper's rates, in
bfloat16, on the validation split. A task takes a few minutes of one core.

    python benchmarks/proxy.py train distillation efc        # objectives; networks are cached in benchmarks/work/proxy
    python benchmarks/proxy.py compare distillation efc      # everything after training, on those networks

Results are added to benchmarks/results/proxy.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from torch import nn

from engram.data import load
from engram.experiments import Plan
from engram.network import NETWORKS, Cache
from engram.network.backbones import ResNet, _convolution
from engram.network.registry import NetworkEntry

HERE = Path(__file__).parent
WORK, RESULTS = HERE / "work" / "proxy", HERE / "results" / "proxy.json"
TASKS = int(os.environ.get("PROXY_TASKS", "3"))


def resnet14(channels: int = 3, *, last_relu: bool = True) -> ResNet:
    return ResNet(_convolution(channels, 16, 3), nn.Identity(), (16, 32, 64), 2, False, last_relu)


NETWORKS["resnet14"] = NetworkEntry("ResNet-14, a proxy of ResNet-32", resnet14, 64)

PROXY: dict[str, Any] = {"network": "resnet14", "crop": 24, "pad": 0, "precision": "bfloat16"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "distillation": {},
    "gamma 0": {"feature_distillation": 0.0},
    "gamma .2": {"feature_distillation": 0.2},
    "rotation": {"rotation_labels": 1.0},
    "efc 1 .1": {"objective": "efc", "elastic": 1.0, "rigid": 0.1},
    "efc .1 .1": {"objective": "efc", "elastic": 0.1, "rigid": 0.1},
    "adagauss": {"objective": "adagauss"},
    "lucir": {"objective": "lucir", "epochs": 70},
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
    "sdc, none": ("sdc", {"compensation": "identity"}),
    "fecam, ridge": ("fecam", {"tune": "every", "compensation": "ridge"}),
}


def run(objective: str, after: str, seed: int = 100) -> dict[str, Any]:
    method, settings = AFTER[after]
    plan = Plan(
        method=method,
        preset="paper",
        settings={**PROXY, **OBJECTIVES[objective], **settings},
        tasks=TASKS,
        validation=0.1,
        seed=seed,
    )
    result = plan.run(load("cifar100", Path(os.environ["ENGRAM_DATA"])), cache=Cache(WORK))
    numbers = {
        **{"average": result.average_incremental_accuracy, "last": result.curve[-1], "curve": result.curve},
        **{"head": result.head_curve[-1] if result.head_curve else None, "bytes": result.memory_bytes},
        "gap": result.drift_gap[-1] if result.drift_gap else None,
        "omega_previous": result.omega_previous[-1] if result.omega_previous else None,
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in numbers.items()}


def main(command: str, *objectives: str) -> None:
    seed = int(os.environ.get("PROXY_SEED", "100"))
    for objective in objectives:
        for after in AFTER if command == "compare" else ["features"]:
            found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            row = found.setdefault(f"{TASKS} tasks, seed {seed}", {}).setdefault(objective, {})
            if after in row:
                continue
            row[after] = run(objective, after, seed)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
            print(objective, "|", after, row[after], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
