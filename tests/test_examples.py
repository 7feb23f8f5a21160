"""The examples run, and show what they say."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from documents_made import prepare

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "examples").is_dir(), reason="a copy without the examples")


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / name))


def test_a_memory_beside_a_plain_loop_remembers_what_the_loop_forgets() -> None:
    accuracies = example("own_loop.py")["main"]()
    assert accuracies["head"] < 0.3
    assert accuracies["memory"] > 0.6


def test_photos_are_learned_folder_by_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    example("own_photos.py")["main"](["mine", "january", "march", "--ask", "photo.jpg"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines[:2]] == ["january: 4 classes", "march: 8 classes"]
    assert lines[2].startswith("photo.jpg: crab ")


def test_the_notebook_is_the_tutorial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    notebook = runpy.run_path(str(ROOT / "docs" / "notebook.py"))
    made = notebook["as_notebook"](notebook["PAGE"])
    assert notebook["NOTEBOOK"].read_text(encoding="utf-8") == made, "run: python docs/notebook.py"


@pytest.mark.parametrize("name", ["bytes", "gap"])
def test_figures_are_what_the_result_files_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    figures = runpy.run_path(str(ROOT / "docs" / "figures.py"))
    (drawn,) = figures["draw"](name, tmp_path)
    committed = ROOT / "docs" / "figures" / f"{name}.svg"
    assert drawn.read_bytes() == committed.read_bytes(), f"run: python docs/figures.py {name}"
    sys.modules.pop("notebook", None)
