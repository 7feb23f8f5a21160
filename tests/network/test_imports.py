"""Packages that take seconds to import, or may be absent, are imported only when they are needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from images_made import encoded, gradient

LATE = {"huggingface_hub", "pillow_heif", "sklearn", "torch._dynamo", "transformers"}
PROGRAM = """
import sys, torch
import engram.network.hub
from engram.data import load
from engram.data.images import decode
from engram.network.training import uncompiled

load("digits")
decode(sys.argv[1])
weight = torch.nn.Parameter(torch.ones(3))
for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS):
    optimiser = uncompiled(kind)([weight])
    optimiser.zero_grad()
    optimiser.step(lambda: (weight**2).sum())
    optimiser.load_state_dict(optimiser.state_dict())
print(*sys.modules)
"""


def test_digits_a_png_and_an_optimiser_need_no_heavy_package(tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(encoded(gradient(), "PNG"))
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(image)], capture_output=True, text=True, check=True)
    assert "torch" in done.stdout.split() and not LATE & set(done.stdout.split())
