"""Packages that take seconds to import, or may be absent, are imported only when they are needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from models_made import draw

from engram.model import ModelFolder, learn

LATE = {"fastapi", "huggingface_hub", "jinja2", "matplotlib", "onnx", "pandas", "pillow_heif", "scipy", "sklearn"}
LATE |= {"sympy", "torch._dynamo", "torchvision", "transformers"}
PROGRAM = """
import sys
from engram.cli import main

sys.argv = ["engram", "predict", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert not ended.code

import torch
from engram.network import NETWORKS, describe_network
from engram.data import load
from engram.network.training import uncompiled

load("digits")
list(map(describe_network, NETWORKS))
weight = torch.nn.Parameter(torch.ones(3))
for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS):
    optimiser = uncompiled(kind)([weight])
    optimiser.zero_grad()
    optimiser.step(lambda: (weight**2).sum())
    optimiser.load_state_dict(optimiser.state_dict())
print(*sys.modules)
"""


def test_predict_digits_and_an_optimiser_need_no_heavy_package(tmp_path: Path) -> None:
    drawn = draw(tmp_path / "drawn", ("a", "b"), 2)
    learn(ModelFolder(tmp_path / "model"), drawn)  # with the pretrained network
    image = str(drawn / "a" / "0.png")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "model"), image, "--quiet"],
        capture_output=True,
        text=True,
        check=True,
    )
    predicted, modules = done.stdout.splitlines()
    assert predicted.startswith(f"{image}: ")
    assert {"torch", "PIL.PngImagePlugin"} <= set(modules.split()) and not LATE & set(modules.split())
