"""The documents: links lead somewhere, commands run as printed, and tables have the numbers of the result files."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from documents_made import COMMANDS, DOCUMENTS, ROOT, SHOWN, Block, blocks, environment, prepare
from warm_engram import write_command

from engram.experiments import Result

RESULTS = ROOT / "benchmarks" / "results"
TABLE1 = RESULTS / "cifar100-table1"
TEN = RESULTS / "cifar100-10-tasks"

# A row of a table, by how it begins, and the result it is of.
README = {
    "**`engram learn`**": "engram learn",
    "SVM, trained on all photos at once": "everything at once, SVM",
    "nearest mean, features of the same network": "frozen, nearest mean",
    "nearest mean, colour histograms": "histogram, nearest mean",
}
TABLE_1 = {
    "finetune": TABLE1 / "finetune",
    "lwf": TABLE1 / "lwf",
    "gamma-lwf": TEN / "gamma-lwf",
    "bic-uncorrected, 20 images": TABLE1 / "bic-uncorrected",
    "icarl, 20 images (its head: .439)": TABLE1 / "icarl",
    "gamma-icarl, 20 images (its head: .442)": TABLE1 / "gamma-icarl",
    "features, 250 features": TABLE1 / "features",
    "lucir, 20 images": TABLE1 / "lucir",
    "eeil, 20 images": TABLE1 / "eeil",
    "joint, all images": TABLE1 / "joint",
    "**LUCIR variant** of `engram`, 250 features, no images": TABLE1 / "engram",
}
ALL_TEN = {
    "gamma-lwf (the network's head)": TEN / "gamma-lwf",
    "**features**": TEN / "features",
    "gamma-icarl, 20 images": TEN / "gamma-icarl",
    "**LUCIR variant**, 250 features, no images": TEN / "engram",
    "... no weight averaging": TEN / "engram-never-held",
    "... no weight averaging, float32, another machine": TEN / "engram-never-held-float32",
}
DIGITS = [
    *(
        "finetune",
        "features-unadapted",
        "lwf",
        "gamma-lwf",
        "**features**",
        "bic-uncorrected",
        "icarl (its head: .887)",
        "eeil",
    ),
    *(
        "gamma-icarl (its head: .841)",
        "bic",
        "**engram** (ours, no images)",
        "lucir",
        "**hybrid**",
        "joint (stores every image)",
    ),
]


def anchors(document: Path) -> set[str]:
    """What a link to a heading of a document may end in, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_something_that_is_there(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        if found.parent == ROOT / "docs" / "generated":  # written when the site is built, which checks the anchors too
            assert f'"{found.stem}"' in (ROOT / "docs" / "generate.py").read_text(), target
            continue
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def rows(document: str, heading: str) -> dict[str, list[str]]:
    """The rows of the tables under a heading, by their first cell; of two that begin alike, the first."""
    text = f"\n{(ROOT / document).read_text()}".split(f"\n{heading}\n", 1)[1]
    section = re.split(r"^#+ ", text, maxsplit=1, flags=re.MULTILINE)[0]
    found: dict[str, list[str]] = {}
    for line in re.findall(r"^\|(.*)\|$", section, re.MULTILINE):
        first, *cells = (cell.strip() for cell in line.split("|"))
        found.setdefault(first, [cell.strip("*") for cell in cells])
    return found


def near(cell: str, value: float) -> bool:
    """Whether a number as it is printed is this one; a half may be rounded either way."""
    digits = len(cell.partition(".")[2])
    return abs(float(cell) - value) <= 0.5 * 10**-digits + 1e-9


@pytest.mark.parametrize(
    ("heading", "table", "classes"),
    [
        ("## The systems of Table 1", TABLE_1, (10, 20, 30, 40, 50, "average", "forgetting", "MB")),
        ("### All ten tasks", ALL_TEN, (*range(10, 101, 10), "average", "MB")),
    ],
    ids=["table1", "ten tasks"],
)
def test_the_tables_are_what_the_result_files_say(
    heading: str, table: dict[str, Path], classes: tuple[object, ...]
) -> None:
    found = rows("docs/ten-epochs.md", heading)
    tasks = max(number for number in classes if isinstance(number, int)) // 10
    for name, folder in table.items():
        result = json.loads((folder / "result.json").read_text())
        curve = result["curve"][:tasks]
        for kind, cell in zip(classes, found[name], strict=True):
            if isinstance(kind, int):
                assert near(cell, curve[kind // 10 - 1]), (name, kind, cell)
            elif kind == "average":
                assert near(cell, sum(curve) / len(curve)), (name, cell)
            elif kind == "MB" and len(result["curve"]) == tasks:
                assert near(cell, result["memory_mb"]), (name, cell, result["memory_mb"])
            elif kind == "forgetting" and len(result["curve"]) == tasks:
                assert near(cell, result["forgetting"]), (name, cell)


def test_the_table_of_the_readme_is_what_the_result_file_says() -> None:
    found = rows("README.md", "# engram")
    draws = [
        draw for draw in json.loads((RESULTS / "own_photos-accuracy.json").read_text()) if draw["dataset"] == "objects"
    ]
    for name, system in README.items():
        for photos, cell in zip((5, 10, 30), found[name][:3], strict=True):
            last = [draw[system][-1] for draw in draws if draw["per_class"] == photos]
            assert len(last) == 4 and near(cell, sum(last) / 4), (name, photos)


def test_the_table_of_digits_is_what_the_result_files_say() -> None:
    found = rows("RESULTS.md", "## Digits: five tasks of two classes, seeds 0–4")
    for name in DIGITS:
        method = re.split(r"[ *]+", name.strip("*"))[0]
        summary = json.loads((RESULTS / "digits" / method / "summary.json").read_text())
        accuracy = summary["average_incremental_accuracy"]
        assert near(found[name][0], accuracy["mean"]), (name, found[name], accuracy)
        assert near(found[name][1], accuracy["deviation"]), (name, found[name], accuracy)
        assert near(found[name][2], summary["curve"][-1]), (name, found[name], summary["curve"])


BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
RUN = [block for block in BLOCKS if block.language in (*COMMANDS, "python") and not block.skipped]
NOT_RUN = 29  # blocks that say why they are not run; a new one is to be counted here
SECONDS = 280  # that a block may take; the machine may be busy with other things
SERVER = "http://127.0.0.1:8000/livez"


def test_every_code_block_is_run_or_says_why_not() -> None:
    unknown = [
        f"{block.document.name}:{block.line}" for block in BLOCKS if block.language not in (*COMMANDS, "python", *SHOWN)
    ]
    assert not unknown, "a block needs one of the languages sh, console, python, text and json"
    assert len([block for block in BLOCKS if block.skipped]) == NOT_RUN
    assert all(block.language in (*COMMANDS, "python") for block in BLOCKS if block.skipped)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a shell in which `engram` starts in milliseconds."""
    folder = tmp_path_factory.mktemp("commands")
    program = [sys.executable, str(ROOT / "tests" / "warm_engram.py"), str(folder / "socket")]
    for name in ("engram", "python-warm"):
        write_command(folder, name, folder / "socket")
    variables = environment(folder)
    with subprocess.Popen(program, env=variables) as warm:
        for _ in range(600):
            if (folder / "socket").exists():
                break
            time.sleep(0.1)
        yield variables
        warm.kill()


@pytest.mark.parametrize("document", sorted({block.document for block in RUN}), ids=lambda path: path.name)
def test_the_code_of_a_document_runs_as_printed(document: Path, shell: dict[str, str], tmp_path: Path) -> None:
    """Commands one after another in a prepared folder; then the document's Python, in one process."""
    chosen = [block for block in RUN if block.document == document]
    if any(block.language in COMMANDS for block in chosen):  # Python alone gets an empty folder
        prepare(tmp_path)
    with ExitStack() as stack:
        for block in chosen:
            if block.background:
                stack.enter_context(started(block, tmp_path, shell))
            elif block.language in COMMANDS:
                finished(["bash", "-euo", "pipefail", "-c", block.commands], block, tmp_path, shell)
    if python := [block for block in chosen if block.language == "python"]:
        (tmp_path / "document.py").write_text("\n".join(block.text for block in python), encoding="utf-8")
        finished(["python-warm", "document.py"], python[0], tmp_path, shell)
    if document.name == "research.md":  # its first example, on ten classes of digits
        result = Result.load(tmp_path / "runs" / "first" / "result.json")
        assert result.average_incremental_accuracy > 0.85
        assert result.memory_bytes == 10 * 100 * 64 * 4


def finished(command: list[str], block: Block, folder: Path, variables: dict[str, str]) -> None:
    ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=SECONDS)
    place = f"{block.document.name}:{block.line}"
    assert ended.returncode == 0, f"{place}\n{block.commands}\n{ended.stdout}\n{ended.stderr}"


@contextmanager
def started(block: Block, folder: Path, variables: dict[str, str]) -> Iterator[None]:
    """Run a block that starts the server, until it answers and beyond."""
    if answers():
        pytest.skip("something else answers at port 8000")
    command, fresh = ["bash", "-euc", block.commands], {**variables, "FRESH": "1"}
    with subprocess.Popen(command, cwd=folder, env=fresh, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + SECONDS
            while not answers():
                assert process.poll() is None and time.monotonic() < deadline, f"{block.commands} does not answer"
                time.sleep(0.2)
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def answers() -> bool:
    try:
        with urllib.request.urlopen(SERVER, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
