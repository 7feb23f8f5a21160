"""HEIC photos on the command line, with and without the package that decodes them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import engram
from images_made import heic, needs_heic
from models_made import DAISY, TULIP
from PIL import Image

from engram.model import ModelFolder

pytestmark = needs_heic


@pytest.fixture
def place(small_model: ModelFolder, tmp_path: Path) -> Path:
    """A folder with a model, and `photos` with two HEIC photos in class folders."""
    (tmp_path / "model").symlink_to(small_model.path)
    for name in (TULIP, DAISY):
        content = (small_model.path.parent / "1" / name / "0.png").read_bytes()
        (tmp_path / "photos" / name).mkdir(parents=True)
        photo = Image.open(io.BytesIO(content)).resize((64, 48), Image.Resampling.BICUBIC)
        (tmp_path / "photos" / name / "IMG_0001.HEIC").write_bytes(heic(photo, quality=90))
    return tmp_path


def test_a_photo_is_predicted(place: Path) -> None:
    done = engram("predict", "model", "photos", "--json", cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    predictions = json.loads(done.stdout)["predictions"]
    assert {each["path"]: each["top"][0]["class"] for each in predictions} == {
        f"photos/{name}/IMG_0001.HEIC": name for name in (TULIP, DAISY)
    }


def test_without_the_package_predict_says_what_to_install(place: Path) -> None:
    blocked = "import sys; sys.modules['pillow_heif'] = None; from engram.cli import main; main()"
    command = [sys.executable, "-c", blocked, "predict", "model", "photos"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, timeout=120)
    assert done.returncode == 1
    assert "IMG_0001.HEIC: Its format is HEIC." in done.stderr
    assert "pillow-heif" in done.stderr and "[heic]" in done.stderr
    assert "Traceback" not in done.stderr
