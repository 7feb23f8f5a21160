"""Jobs that wait, are cancelled, are killed, or are sent twice."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from models_made import DAISY, TULIP, draw
from server_made import Serve, files, image_bytes, update_form, wait_for_job, wait_until
from starlette.testclient import TestClient

from engram.model import LearnOptions, ModelFolder, forget, learn, rename, verify
from engram.server import Config
from engram.server.uploads import Upload

LONG = {"epochs": 100_000}  # an update that does not end by itself
PAIR = {  # two new classes, so that the network is trained
    "files": files(*(image_bytes(name, seed) for name in ("grey", TULIP) for seed in range(8))),
    "data": {"classes": ["grey"] * 8 + ["other"] * 8},
}


def job_of(client: TestClient, id: str) -> Any:
    return client.app.state.services.jobs.get(id)  # type: ignore[attr-defined]


def learning(client: TestClient) -> Any:
    """A job whose process is running a long update."""
    job = job_of(client, client.post("/api/teach", **PAIR).json()["id"])
    wait_until(lambda: job.process is not None and job.status.progress.phase not in ("queued", "read"))
    return job


def test_a_killed_update_fails_and_leaves_the_model_unchanged(serve: Serve, model: ModelFolder) -> None:
    client = serve(nice=Config().nice, **LONG)
    job = learning(client)
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    (decoder,) = client.app.state.services.update_decoders.processes  # type: ignore[attr-defined]
    for process in (job.process, decoder.process):
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(ours + 10, 19)
    os.kill(job.process.pid, signal.SIGKILL)
    status = wait_for_job(client, job.status.id)
    assert status["state"] == "failed"
    assert client.get("/readyz").json()["version"] == 2
    assert client.post("/api/rename", json={"from": TULIP, "to": "tulip"}).status_code == 200
    assert verify(model).intact


def test_a_running_update_is_cancelled(serve: Serve, model: ModelFolder) -> None:
    client = serve(**LONG)
    job = learning(client)
    assert client.get(f"/api/jobs/{job.status.id}").json()["progress"]["of"] is not None
    assert client.delete(f"/api/jobs/{job.status.id}").status_code == 200
    status = wait_for_job(client, job.status.id)
    assert (status["state"], status["result"], status["problem"]) == ("cancelled", None, None)
    again = client.delete(f"/api/jobs/{job.status.id}")
    assert again.status_code == 409
    assert verify(model).intact
    assert model.current().version == 2


def test_a_cancelled_first_update_leaves_no_folder(serve: Serve, tmp_path: Path) -> None:
    client = serve(ModelFolder(tmp_path / "new"), **LONG)
    job = learning(client)
    assert (tmp_path / "new").exists()
    client.delete(f"/api/jobs/{job.status.id}")
    assert wait_for_job(client, job.status.id)["state"] == "cancelled"
    assert not (tmp_path / "new").exists()


def waiting(client: TestClient, **sent: Any) -> str:
    """The id of a job that waits for the lock of the model."""
    id: str = client.post("/api/teach", **sent).json()["id"]
    job = job_of(client, id)
    wait_until(lambda: job.status.progress is not None and job.status.progress.phase == "wait")
    assert client.get(f"/api/jobs/{id}").json()["state"] == "queued"
    return id


def test_an_update_waits_while_another_process_locks_the_model(client: TestClient, model: ModelFolder) -> None:
    with model.writing():
        id = waiting(client, **update_form("grey"))
    status = wait_for_job(client, id)
    assert (status["state"], status["problem"]) == ("done", None)
    assert "grey" in model.current().classes


def test_an_update_that_waits_for_the_lock_is_cancelled(client: TestClient, model: ModelFolder) -> None:
    with model.writing():
        id = waiting(client, **update_form("grey"))
        assert client.delete(f"/api/jobs/{id}").status_code == 200
        status = wait_for_job(client, id)
    assert (status["state"], status["problem"]) == ("cancelled", None)
    assert model.current().version == 2


def test_a_version_saved_by_another_process_is_not_mistaken_for_its_own(serve: Serve, model: ModelFolder) -> None:
    client = serve(**LONG)
    with model.writing() as writer:
        id = waiting(client, **PAIR)
        writer.use(1)
    job = job_of(client, id)
    wait_until(lambda: job.status.state == "learning" and job.status.progress.phase == "train")
    client.delete(f"/api/jobs/{id}")
    status = wait_for_job(client, id)
    assert (status["state"], status["problem"]) == ("cancelled", None)


def test_an_update_does_not_wait_for_the_lock_for_ever(serve: Serve, model: ModelFolder) -> None:
    client = serve(lock_seconds=0.5)
    with model.writing():
        status = wait_for_job(client, client.post("/api/teach", **update_form("grey")).json()["id"])
    assert status["state"] == "failed"


def test_an_update_uses_the_image_size_of_a_model_created_meanwhile(serve: Serve, tmp_path: Path) -> None:
    folder, other = ModelFolder(tmp_path / "new"), ModelFolder(tmp_path / "other")
    learn(other, draw(tmp_path / "images", (TULIP, DAISY), 6), LearnOptions(image_size=8, epochs=1))
    client = serve(folder)
    with folder.writing():
        id = waiting(client, **update_form("grey"))
        for part in ("networks", "versions", "current.json"):
            (other.path / part).rename(folder.path / part)
    assert wait_for_job(client, id)["problem"] is None
    assert client.get("/api/model").json()["image_size"] == 8
    assert folder.current().classes == (TULIP, DAISY, "grey")


@pytest.mark.parametrize("by_command", [False, True])
def test_finished_jobs_are_deleted_when_a_class_is_forgotten(
    client: TestClient, model: ModelFolder, by_command: bool
) -> None:
    job = client.post("/api/teach", **update_form("grey"), headers={"Idempotency-Key": "one"}).json()["id"]
    wait_for_job(client, job)
    if by_command:
        rename(model, "grey", "ash")
        forget(model, ["ash"])
    else:
        client.post("/api/rename", json={"from": "grey", "to": "ash"})
        assert client.post("/api/forget", json={"classes": ["ash"]}).status_code == 200
        assert client.get("/api/jobs").json() == {"jobs": []}
    wait_until(lambda: client.get("/api/jobs").json() == {"jobs": []})
    assert "grey" not in client.get("/api/jobs").text + client.get("/api/model").text
    assert client.get(f"/api/jobs/{job}").status_code == 404


def test_unfinished_jobs_stay_when_a_class_is_forgotten(serve: Serve, model: ModelFolder) -> None:
    client = serve(**LONG)
    job = learning(client)
    id = client.post("/api/teach", **update_form("grey")).json()["id"]
    client.app.state.services.jobs.delete_finished()  # type: ignore[attr-defined]
    assert [each["id"] for each in client.get("/api/jobs").json()["jobs"]] == [job.status.id, id]


def test_a_class_is_forgotten_by_a_decomposed_name(client: TestClient) -> None:
    wait_for_job(client, client.post("/api/teach", **update_form("café")).json()["id"])
    assert client.post("/api/forget", json={"classes": ["cafe\u0301"]}).json()["forgotten"] == ["café"]
    assert client.get("/api/jobs").json() == {"jobs": []}


def test_a_full_queue_answers_with_retry_after(serve: Serve) -> None:
    client = serve(queue=1, **LONG)
    job = learning(client)
    waiting = client.post("/api/teach", **update_form("grey"))
    assert waiting.status_code == 202
    refused = client.post("/api/teach", **update_form("grey"))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert client.delete(f"/api/jobs/{waiting.json()['id']}").json()["state"] == "cancelled"
    assert client.post("/api/teach", **update_form("grey")).status_code == 202
    assert client.post("/api/classify", files=files(image_bytes(TULIP))).status_code == 200
    response = client.post("/api/rename", json={"from": TULIP, "to": "tulip"})
    assert response.status_code == 409 and "secret-place" not in response.text
    client.delete(f"/api/jobs/{job.status.id}")


def test_an_update_sent_twice_is_learned_once(client: TestClient) -> None:
    key = {"Idempotency-Key": "one"}
    first = client.post("/api/teach", **update_form("grey"), headers=key).json()["id"]
    assert client.post("/api/teach", **update_form("grey"), headers=key).json()["id"] == first
    wait_for_job(client, first)
    assert client.post("/api/teach", **update_form("grey"), headers=key).json()["id"] == first
    assert client.post("/api/teach", **update_form("grey", 5), headers=key).status_code == 422
    assert len(client.get("/api/jobs").json()["jobs"]) == 1


def unreadable(client: TestClient, *classes: str) -> str:
    """The id of a finished job that was sent files that are not images."""
    sent = client.post("/api/teach", files=files(*[b"x"] * len(classes)), data={"classes": list(classes)})
    id: str = sent.json()["id"]
    wait_for_job(client, id)
    return id


def test_a_failed_update_can_be_sent_again_with_the_same_key(serve: Serve, model: ModelFolder) -> None:
    client, key = serve(lock_seconds=0.0, finished_jobs=2), {"Idempotency-Key": "one"}
    with model.writing():
        failed = client.post("/api/teach", **update_form("grey"), headers=key).json()["id"]
        assert wait_for_job(client, failed)["state"] == "failed"
    again = client.post("/api/teach", **update_form("grey"), headers=key).json()["id"]
    assert again != failed
    assert wait_for_job(client, again)["state"] == "done"
    unreadable(client, "other")
    assert client.get(f"/api/jobs/{failed}").status_code == 404  # deleted by now; the other job has the key
    assert client.post("/api/teach", **update_form("grey"), headers=key).json()["id"] == again


def test_an_update_killed_after_it_was_saved_is_not_learned_again(client: TestClient, model: ModelFolder) -> None:
    key = {"Idempotency-Key": "one"}
    jobs = client.app.state.services.jobs  # type: ignore[attr-defined]
    jobs._communicate = lambda *_: {"locked": model.current().version - 1}  # as if it was killed
    late = client.post("/api/teach", **update_form("grey"), headers=key).json()["id"]
    assert "version 2" in wait_for_job(client, late)["problem"]
    assert client.post("/api/teach", **update_form("grey"), headers=key).json()["id"] == late


def test_old_finished_jobs_are_deleted(serve: Serve) -> None:
    client = serve(finished_jobs=1)
    ids = [unreadable(client, f"c{number}") for number in range(3)]
    assert client.get(f"/api/jobs/{ids[0]}").status_code == 404
    assert client.get(f"/api/jobs/{ids[2]}").status_code == 200


def test_remembered_jobs_are_limited_in_bytes(serve: Serve) -> None:
    """Names of emoji take the most memory for a character."""
    client = serve(finished_bytes=100_000)
    ids = [unreadable(client, *(f"{'😀' * 295}{job}{name:03}" for name in range(60))) for job in range(4)]
    response = client.get("/api/jobs")
    assert [job["id"] for job in response.json()["jobs"]] == ids[-1:]
    assert len(response.content) < 200_000
    unreadable(client, "small")
    assert len(client.get("/api/jobs").json()["jobs"]) == 2


def test_jobs_are_listed_in_pages(client: TestClient) -> None:
    ids = [unreadable(client, f"c{number}") for number in range(5)]

    def page(query: str) -> list[str]:
        return [job["id"] for job in client.get(f"/api/jobs?{query}").json()["jobs"]]

    assert page("limit=2") == ids[3:]
    assert page(f"limit=2&before={ids[3]}") == ids[1:3]
    assert page(f"limit=2&before={ids[1]}") == ids[:1]
    assert client.get("/api/jobs?before=none").status_code == 404


def test_uploads_never_have_a_name_on_disk(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload is larger than what Starlette keeps in memory."""
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


def test_closing_the_server_ends_its_update(serve: Serve, model: ModelFolder) -> None:
    client = serve(**LONG)
    job = learning(client)
    pid = job.process.pid
    client.app.state.services.close()  # type: ignore[attr-defined]
    assert job.status.state == "cancelled"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert model.current().version == 2


def test_a_full_disk_is_an_error_while_the_upload_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "r+b"))  # noqa: SIM115
    upload = Upload()
    with pytest.raises(OSError) as caught:
        upload.add("1.png", "cat", b"fewer bytes than Python holds back")
    assert caught.value.errno == errno.ENOSPC
    upload.close()
