"""Lessons that wait, are stopped, are killed, or are sent twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from models_made import TULIP
from server_made import Serve, files, lesson, over, picture, until
from starlette.testclient import TestClient

from engram.model import ModelFolder, verify

LONG = {"epochs": 100_000}  # a lesson that does not end by itself
PAIR = {  # two new classes, for which the network is trained
    "files": files(*(picture(name, seed) for name in ("grey", TULIP) for seed in range(8))),
    "data": {"classes": ["grey"] * 8 + ["other"] * 8},
}


def learning(client: TestClient) -> Any:
    """A long lesson under way, with its process."""
    id = client.post("/api/teach", **PAIR).json()["id"]
    job = client.app.state.parts.jobs.get(id)  # type: ignore[attr-defined]
    until(lambda: job.process is not None and job.progress["phase"] not in ("queued", "read"))
    return job


def test_a_lesson_that_is_killed_fails_and_says_what_is_needed(serve: Serve, model: ModelFolder) -> None:
    client = serve(**LONG)
    job = learning(client)
    assert os.getpriority(os.PRIO_PROCESS, job.process.pid) == 10
    os.kill(job.process.pid, signal.SIGKILL)
    told = over(client, job.id)
    assert told["state"] == "failed"
    assert "send them again" in told["problem"]
    assert client.get("/readyz").json()["generation"] == 2
    assert client.post("/api/rename", json={"from": TULIP, "to": "tulip"}).status_code == 200
    assert verify(model).whole


def test_a_lesson_is_stopped(serve: Serve, model: ModelFolder) -> None:
    client = serve(**LONG)
    job = learning(client)
    assert client.get(f"/api/jobs/{job.id}").json()["progress"]["of"] is not None
    assert client.delete(f"/api/jobs/{job.id}").status_code == 200
    told = over(client, job.id)
    assert (told["state"], told["result"], told["problem"]) == ("cancelled", None, None)
    again = client.delete(f"/api/jobs/{job.id}")
    assert again.status_code == 409
    assert verify(model).whole
    assert model.current().generation == 2


def test_a_first_lesson_that_is_stopped_leaves_nothing(serve: Serve, tmp_path: Path) -> None:
    client = serve(ModelFolder(tmp_path / "new"), **LONG)
    job = learning(client)
    assert (tmp_path / "new").exists()
    client.delete(f"/api/jobs/{job.id}")
    assert over(client, job.id)["state"] == "cancelled"
    assert not (tmp_path / "new").exists()


def test_lessons_that_name_a_class_that_is_forgotten_are_forgotten_with_it(client: TestClient) -> None:
    other = client.post("/api/teach", files=files(b"none"), data={"classes": ["other"]}).json()["id"]
    job = client.post("/api/teach", **lesson("grey"), headers={"Idempotency-Key": "one"}).json()["id"]
    over(client, job)
    assert client.post("/api/forget", json={"classes": ["grey"]}).status_code == 200
    assert [each["id"] for each in client.get("/api/jobs").json()["jobs"]] == [other]
    assert "grey" not in client.get("/api/jobs").text + client.get("/api/model").text
    assert client.get(f"/api/jobs/{job}").status_code == 404


def test_an_accent_may_be_typed_apart_when_a_class_is_forgotten(client: TestClient) -> None:
    over(client, client.post("/api/teach", **lesson("café")).json()["id"])
    assert client.post("/api/forget", json={"classes": ["cafe\u0301"]}).json()["forgotten"] == ["café"]
    assert client.get("/api/jobs").json() == {"jobs": []}


def test_a_queue_that_is_full_asks_to_come_back(serve: Serve) -> None:
    client = serve(queue=1, **LONG)
    job = learning(client)
    waiting = client.post("/api/teach", **lesson("grey"))
    assert waiting.status_code == 202
    refused = client.post("/api/teach", **lesson("grey"))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert client.delete(f"/api/jobs/{waiting.json()['id']}").json()["state"] == "cancelled"
    assert client.post("/api/teach", **lesson("grey")).status_code == 202
    assert client.post("/api/classify", files=files(picture(TULIP))).status_code == 200
    said = client.post("/api/rename", json={"from": TULIP, "to": "tulip"})
    assert said.status_code == 409 and "secret-place" not in said.text
    client.delete(f"/api/jobs/{job.id}")


def test_a_lesson_that_is_sent_twice_is_taught_once(client: TestClient) -> None:
    key = {"Idempotency-Key": "one"}
    first = client.post("/api/teach", **lesson("grey"), headers=key).json()["id"]
    assert client.post("/api/teach", **lesson("grey"), headers=key).json()["id"] == first
    over(client, first)
    assert client.post("/api/teach", **lesson("grey"), headers=key).json()["id"] == first
    assert client.post("/api/teach", **lesson("grey", 5), headers=key).status_code == 422
    assert len(client.get("/api/jobs").json()["jobs"]) == 1


def test_a_lesson_that_is_long_over_is_forgotten(serve: Serve) -> None:
    client = serve(finished=1)
    ids = []
    for number in range(3):
        sent = client.post("/api/teach", files=files(b"none"), data={"classes": [f"c{number}"]})
        ids.append(sent.json()["id"])
        over(client, ids[-1])
    assert client.get(f"/api/jobs/{ids[0]}").status_code == 404
    assert client.get(f"/api/jobs/{ids[2]}").status_code == 200


def test_pictures_never_have_a_name_on_disk(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever found in the temporary folder, though each picture is larger than what is kept in memory."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    client = serve(**LONG)
    job = learning(client)
    large = client.post("/api/teach", files=files(bytes(3 << 20)), data={"classes": ["zeros"]})
    assert large.status_code == 202
    found = [path for path in place.rglob("*") if path.is_file() and path.stat().st_size]
    assert not found
    client.delete(f"/api/jobs/{job.id}")


def test_a_server_that_ends_ends_its_lessons(serve: Serve, model: ModelFolder) -> None:
    client = serve(**LONG)
    job = learning(client)
    pid = job.process.pid
    client.app.state.parts.close()  # type: ignore[attr-defined]
    assert job.state == "cancelled"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert model.current().generation == 2
