"""Lessons that wait, are stopped, are killed, or are sent twice."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from models_made import DAISY, TULIP, draw
from server_made import Serve, files, lesson, over, picture, until
from starlette.testclient import TestClient

from engram.model import LearnOptions, ModelFolder, learn, rename, verify
from engram.server.jobs import Upload

LONG = {"epochs": 100_000}  # a lesson that does not end by itself
PAIR = {  # two new classes, for which the network is trained
    "files": files(*(picture(name, seed) for name in ("grey", TULIP) for seed in range(8))),
    "data": {"classes": ["grey"] * 8 + ["other"] * 8},
}


def learning(client: TestClient) -> Any:
    """A long lesson under way, with its process."""
    id = client.post("/api/teach", **PAIR).json()["id"]
    job = client.app.state.services.jobs.get(id)  # type: ignore[attr-defined]
    until(lambda: job.process is not None and job.status.progress.phase not in ("queued", "read"))
    return job


def test_a_lesson_that_is_killed_fails_and_says_what_is_needed(serve: Serve, model: ModelFolder) -> None:
    client = serve(**LONG)
    job = learning(client)
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, job.process.pid) == min(ours + 10, 19)
    os.kill(job.process.pid, signal.SIGKILL)
    told = over(client, job.status.id)
    assert told["state"] == "failed"
    assert "Send them again" in told["problem"]
    assert client.get("/readyz").json()["generation"] == 2
    assert client.post("/api/rename", json={"from": TULIP, "to": "tulip"}).status_code == 200
    assert verify(model).intact


def test_a_lesson_is_stopped(serve: Serve, model: ModelFolder) -> None:
    client = serve(**LONG)
    job = learning(client)
    assert client.get(f"/api/jobs/{job.status.id}").json()["progress"]["of"] is not None
    assert client.delete(f"/api/jobs/{job.status.id}").status_code == 200
    told = over(client, job.status.id)
    assert (told["state"], told["result"], told["problem"]) == ("cancelled", None, None)
    again = client.delete(f"/api/jobs/{job.status.id}")
    assert again.status_code == 409
    assert verify(model).intact
    assert model.current().generation == 2


def test_a_first_lesson_that_is_stopped_leaves_nothing(serve: Serve, tmp_path: Path) -> None:
    client = serve(ModelFolder(tmp_path / "new"), **LONG)
    job = learning(client)
    assert (tmp_path / "new").exists()
    client.delete(f"/api/jobs/{job.status.id}")
    assert over(client, job.status.id)["state"] == "cancelled"
    assert not (tmp_path / "new").exists()


def waiting(client: TestClient, **sent: Any) -> str:
    """A lesson that waits for a folder that another holds."""
    id: str = client.post("/api/teach", **sent).json()["id"]
    job = client.app.state.services.jobs.get(id)  # type: ignore[attr-defined]
    until(lambda: job.status.progress is not None and job.status.progress.phase == "wait")
    assert client.get(f"/api/jobs/{id}").json()["state"] == "queued"
    return id


def test_a_lesson_waits_for_another_command_and_is_taught_then(client: TestClient, model: ModelFolder) -> None:
    with model.writing():
        id = waiting(client, **lesson("grey"))
    told = over(client, id)
    assert (told["state"], told["problem"]) == ("done", None)
    assert "grey" in model.current().classes


def test_a_lesson_that_waits_for_another_command_is_stopped(client: TestClient, model: ModelFolder) -> None:
    with model.writing():
        id = waiting(client, **lesson("grey"))
        assert client.delete(f"/api/jobs/{id}").status_code == 200
        told = over(client, id)
    assert (told["state"], told["problem"]) == ("cancelled", None)
    assert model.current().generation == 2


def test_what_another_saved_while_a_lesson_waited_is_not_taken_for_its_own(serve: Serve, model: ModelFolder) -> None:
    client = serve(**LONG)
    with model.writing() as writer:
        id = waiting(client, **PAIR)
        writer.use(1)
    job = client.app.state.services.jobs.get(id)  # type: ignore[attr-defined]
    until(lambda: job.status.state == "learning" and job.status.progress.phase == "train")
    client.delete(f"/api/jobs/{id}")
    told = over(client, id)
    assert (told["state"], told["problem"]) == ("cancelled", None)


def test_a_lesson_does_not_wait_for_another_command_for_ever(serve: Serve, model: ModelFolder) -> None:
    client = serve(lock_seconds=0.5)
    with model.writing():
        told = over(client, client.post("/api/teach", **lesson("grey")).json()["id"])
    assert told["state"] == "failed"
    assert "Send them again when" in told["problem"]


def test_a_lesson_is_taught_in_the_size_of_a_model_that_another_made_meanwhile(serve: Serve, tmp_path: Path) -> None:
    folder, other = ModelFolder(tmp_path / "new"), ModelFolder(tmp_path / "other")
    learn(other, draw(tmp_path / "pictures", (TULIP, DAISY), 6), LearnOptions(image_size=8, epochs=1))
    client = serve(folder)
    with folder.writing():
        id = waiting(client, **lesson("grey"))
        for part in ("networks", "generations", "current.json"):
            (other.path / part).rename(folder.path / part)
    assert over(client, id)["problem"] is None
    assert client.get("/api/model").json()["image_size"] == 8
    assert folder.current().classes == (TULIP, DAISY, "grey")


@pytest.mark.parametrize("by_command", [False, True])
def test_lessons_are_forgotten_with_a_class_whatever_it_was_called_then(
    client: TestClient, model: ModelFolder, by_command: bool
) -> None:
    job = client.post("/api/teach", **lesson("grey"), headers={"Idempotency-Key": "one"}).json()["id"]
    over(client, job)
    if by_command:
        rename(model, "grey", "ash")
    else:
        client.post("/api/rename", json={"from": "grey", "to": "ash"})
    assert client.post("/api/forget", json={"classes": ["ash"]}).status_code == 200
    assert client.get("/api/jobs").json() == {"jobs": []}
    assert "grey" not in client.get("/api/jobs").text + client.get("/api/model").text
    assert client.get(f"/api/jobs/{job}").status_code == 404


def test_a_lesson_that_waits_is_not_forgotten_with_a_class(serve: Serve, model: ModelFolder) -> None:
    client = serve(**LONG)
    job = learning(client)
    id = client.post("/api/teach", **lesson("grey")).json()["id"]
    client.app.state.services.jobs.delete_finished()  # type: ignore[attr-defined]
    assert [each["id"] for each in client.get("/api/jobs").json()["jobs"]] == [job.status.id, id]


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
    client.delete(f"/api/jobs/{job.status.id}")


def test_a_lesson_that_is_sent_twice_is_taught_once(client: TestClient) -> None:
    key = {"Idempotency-Key": "one"}
    first = client.post("/api/teach", **lesson("grey"), headers=key).json()["id"]
    assert client.post("/api/teach", **lesson("grey"), headers=key).json()["id"] == first
    over(client, first)
    assert client.post("/api/teach", **lesson("grey"), headers=key).json()["id"] == first
    assert client.post("/api/teach", **lesson("grey", 5), headers=key).status_code == 422
    assert len(client.get("/api/jobs").json()["jobs"]) == 1


def test_a_lesson_of_which_nothing_came_can_be_sent_again_with_the_same_key(serve: Serve, model: ModelFolder) -> None:
    client, key = serve(lock_seconds=0.0, finished_jobs=1), {"Idempotency-Key": "one"}
    with model.writing():
        failed = client.post("/api/teach", **lesson("grey"), headers=key).json()["id"]
        assert over(client, failed)["state"] == "failed"
    again = client.post("/api/teach", **lesson("grey"), headers=key).json()["id"]
    assert again != failed
    assert over(client, again)["state"] == "done"
    client.post("/api/teach", files=files(b"none"), data={"classes": ["other"]})
    assert client.get(f"/api/jobs/{failed}").status_code == 404  # long over by now; the key is the other's
    assert client.post("/api/teach", **lesson("grey"), headers=key).json()["id"] == again


def test_a_lesson_that_was_killed_once_it_was_saved_is_not_taught_again(client: TestClient, model: ModelFolder) -> None:
    key = {"Idempotency-Key": "one"}
    jobs = client.app.state.services.jobs  # type: ignore[attr-defined]
    jobs._communicate = lambda *_: {"locked": model.current().generation - 1}  # as if it was killed
    late = client.post("/api/teach", **lesson("grey"), headers=key).json()["id"]
    assert "saved as generation 2" in over(client, late)["problem"]
    assert client.post("/api/teach", **lesson("grey"), headers=key).json()["id"] == late


def test_a_lesson_that_is_long_over_is_forgotten(serve: Serve) -> None:
    client = serve(finished_jobs=1)
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
    client.delete(f"/api/jobs/{job.status.id}")


def test_a_server_that_ends_ends_its_lessons(serve: Serve, model: ModelFolder) -> None:
    client = serve(**LONG)
    job = learning(client)
    pid = job.process.pid
    client.app.state.services.close()  # type: ignore[attr-defined]
    assert job.status.state == "cancelled"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert model.current().generation == 2


def test_a_disk_that_is_full_is_told_while_pictures_arrive_and_not_in_their_lesson(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "r+b"))  # noqa: SIM115
    upload = Upload()
    with pytest.raises(OSError, match="No space left"):
        upload.add("1.png", "cat", b"fewer bytes than Python holds back")
    upload.close()
