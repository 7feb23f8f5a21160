"""Two torchruns as two machines: each in a network namespace of its own, and a cable between them to be pulled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import ENVIRONMENT, SECONDS, engram

from engram.experiments import Result

pytestmark = pytest.mark.slow


class Machine(NamedTuple):
    """A network namespace, its end of the cable, and a folder that the other does not see."""

    namespace: str
    interface: str
    folder: Path


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    if shutil.which("ip") is None:
        pytest.skip("`ip` is not installed (Debian, Ubuntu: apt install iproute2)")
    number = os.getpid()
    made = [Machine(f"engram-{number}-{end}", f"cable-{end}", tmp_path / end) for end in "ab"]
    try:
        for machine in made:
            ip("netns", "add", machine.namespace)
            machine.folder.mkdir()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    try:
        first, second = made
        cable = ["link", "add", first.interface, "netns", first.namespace, "type", "veth"]
        ip(*cable, "peer", "name", second.interface, "netns", second.namespace)
        for address, machine in enumerate(made, start=1):
            ip("-n", machine.namespace, "address", "add", f"10.77.0.{address}/24", "dev", machine.interface)
            for interface in (machine.interface, "lo"):
                ip("-n", machine.namespace, "link", "set", interface, "up")
        yield made
    finally:
        for machine in made:
            ip("netns", "delete", machine.namespace)


def started(machines: list[Machine], *arguments: str) -> list[subprocess.Popen[str]]:
    """`engram` with these arguments under a torchrun on each machine, one process each."""
    commands = []
    for rank, machine in enumerate(machines):
        nodes = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "10.77.0.1", "--master-port", "29500"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes, "--nproc-per-node", "1", "-m", "engram"]
        commands.append(
            subprocess.Popen(
                ["ip", "netns", "exec", machine.namespace, *torchrun, *arguments],
                cwd=machine.folder,
                env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": machine.interface},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return commands


def test_two_machines_learn_what_one_does_and_only_rank_0_writes(machines: list[Machine], tmp_path: Path) -> None:
    options = ["run", "features", "--tasks", "2", "--epochs", "3", "--out", "run", "--json"]
    said = [command.communicate(timeout=180) for command in started(machines, *options)]
    assert engram(*options, cwd=tmp_path).returncode == 0
    found, alone = (Result.load(place / "run" / "result.json") for place in (machines[0].folder, tmp_path))
    assert found.curve == pytest.approx(alone.curve, abs=0.02)
    assert found.omega == pytest.approx(alone.omega, abs=0.01)
    assert found.environment["processes"] == "2"
    assert said[0][0].startswith("{") and said[1][0] == ""
    assert not list(machines[1].folder.iterdir())


def test_both_machines_end_when_the_network_fails_and_one_can_resume(machines: list[Machine]) -> None:
    options = ["run", "features", "--tasks", "1", "--epochs", "80", "--set", "batch_size=8", "--out", "run", "--quiet"]
    commands = started(machines, *options)
    events, limit = machines[0].folder / "run" / "events.jsonl", time.monotonic() + 120
    while not events.exists() or '"epoch": 3' not in events.read_text():
        assert all(command.poll() is None for command in commands) and time.monotonic() < limit
        time.sleep(0.1)
    ip("-n", machines[0].namespace, "link", "set", machines[0].interface, "down")
    said = [command.communicate(timeout=SECONDS)[1] for command in commands]
    assert [command.returncode for command in commands] == [1, 1]
    assert "Process 2 of 2" in said[0]
    assert said[1].startswith("error: ")
    assert engram(*options, "--resume", cwd=machines[0].folder).returncode == 0
