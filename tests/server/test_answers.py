"""Responses about images and the model, and after updates and edits."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from folders_made import paint
from models_made import DAISY, FORMULA, NAMES, TULIP, copied
from server_made import Serve, files, image_bytes, not_loading, update_form, wait_for_job, wait_until
from starlette.testclient import TestClient

from engram.data.images import decode
from engram.model import Answer, ModelFolder, answers, forget, inspect, learn, load, predict, rename


def test_predictions_match_the_model(shared_client: TestClient, small_model: ModelFolder) -> None:
    contents = [image_bytes(name) for name in NAMES]
    response = shared_client.post("/api/classify?top=2&reject=0", files=files(*contents))
    assert response.status_code == 200
    assert response.json()["version"] == small_model.current().version
    loaded = load(small_model, device="cpu")
    for number, (content, prediction) in enumerate(zip(contents, response.json()["predictions"], strict=True)):
        ((expected, _),) = answers(loaded, decode(content, size=16)[None], top=2)
        assert prediction["name"] == f"{number}.png"
        assert [each["class"] for each in prediction["top"]] == [each.name for each in expected]
        probabilities = [each["probability"] for each in prediction["top"]]
        assert probabilities == pytest.approx([each.probability for each in expected], abs=1e-4)
        assert prediction["rejected"] is False


def test_a_prediction_below_the_threshold_is_rejected(serve: Serve, calibrated_model: ModelFolder) -> None:
    response = serve(calibrated_model).post("/api/classify?reject=1", files=files(image_bytes("grey"))).json()
    assert response["calibrated"] is True and response["predictions"][0]["rejected"] is True


def test_an_uncalibrated_model_cannot_reject(shared_client: TestClient) -> None:
    response = shared_client.post("/api/classify", files=files(image_bytes("grey"))).json()
    assert response["calibrated"] is False and response["predictions"][0]["rejected"] is False
    refused = shared_client.post("/api/classify?reject=0.5", files=files(image_bytes("grey")))
    assert refused.status_code == 409 and "calibrated" in refused.json()["detail"]


def test_images_of_unknown_classes_are_rejected_as_predict_does(serve: Serve, tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "colours")
    paths = sorted(paint(tmp_path / "images", ("red", "green", "blue", "yellow"), 4).rglob("*.*"))
    learn(folder, tmp_path / "images")
    contents = [path.read_bytes() for path in paths]
    expected = [each.rejected for each in predict(load(folder), paths, reject="20%")]  # type: ignore[union-attr]
    client = serve(folder)
    for query, rejected in (("reject=20%25", expected), ("reject=0.0", [False] * len(contents))):
        response = client.post(f"/api/classify?{query}", files=files(*contents)).json()
        assert [each["rejected"] for each in response["predictions"]] == rejected
    noise = client.post("/api/classify?reject=auto", files=files(image_bytes("grey"))).json()
    assert noise["predictions"][0]["rejected"] is True
    offered = {each["rate"]: each for each in client.get("/api/evidence").json()["rejections"]}
    assert offered[0.05] == client.get("/api/model").json()["rejection"]
    assert offered[0.2]["known_accepted"] == pytest.approx(1 - sum(expected) / len(expected), abs=0.1)


def test_a_model_that_cannot_estimate_the_rate_refuses_it(shared_client: TestClient) -> None:
    refused = shared_client.post("/api/classify?reject=auto", files=files(image_bytes("grey")))
    assert refused.status_code == 409 and "probability" in refused.json()["detail"]


def test_an_unreadable_file_is_reported_and_the_others_are_classified(shared_client: TestClient) -> None:
    response = shared_client.post("/api/classify", files=files(b"no image", image_bytes(TULIP))).json()["predictions"]
    assert response[0] == {"name": "0.png", "problem": response[0]["problem"]}
    assert response[1]["top"]


def test_a_missing_model_is_reported_and_not_created(serve: Serve, tmp_path: Path) -> None:
    client = serve(ModelFolder(tmp_path / "none"))
    assert client.get("/livez").status_code == 200
    assert client.get("/readyz").status_code == 503
    response = client.get("/api/model")
    assert (response.status_code, response.json()) == (200, None)
    response = client.post("/api/classify", files=files(image_bytes(TULIP)))
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/problem+json"
    for path, body in (("forget", {"classes": ["a"]}), ("rollback", {})):
        assert client.post(f"/api/{path}", json=body).status_code == 404
    assert not (tmp_path / "none").exists()


def test_the_model_is_described_as_by_inspect(shared_client: TestClient, small_model: ModelFolder) -> None:
    status = shared_client.get("/api/model").json()
    assert status["version"] == 2
    assert [each["name"] for each in status["classes"]] == [each.name for each in inspect(small_model).classes]
    assert shared_client.get("/readyz").json()["version"] == 2


def test_a_new_class_is_learned_and_predicted(client: TestClient) -> None:
    assert client.get("/readyz").json()["version"] == 2
    begun = client.post("/api/teach", **update_form("grey"))
    assert begun.status_code == 202
    assert begun.json()["state"] in ("queued", "learning")
    assert begun.json()["classes"] == {"grey": 8}
    assert set(begun.json()["progress"]) == {"phase", "done", "of", "seconds_left"}
    job = wait_for_job(client, begun.json()["id"])
    assert (job["state"], job["problem"]) == ("done", None)
    assert job["result"]["new"] == {"grey": 8}
    assert {each["name"] for each in job["result"]["class_accuracies"]} == {*NAMES, "grey"}
    response = client.post("/api/classify", files=files(image_bytes("grey", 99))).json()
    assert response["version"] == job["result"]["version"] == 3
    assert response["predictions"][0]["top"][0]["class"] == "grey"
    assert [each["id"] for each in client.get("/api/jobs").json()["jobs"]] == [job["id"]]


def test_a_single_class_is_learned_without_training(serve: Serve) -> None:
    client = serve(epochs=None)
    job = wait_for_job(client, client.post("/api/teach", **update_form("grey")).json()["id"])
    assert job["state"] == "done", job
    assert client.get("/readyz").json() == {"version": 3, "damaged": None}
    assert client.post("/api/forget", json={"classes": ["grey"]}).status_code == 200


def test_the_first_update_creates_the_model(serve: Serve, tmp_path: Path) -> None:
    client = serve(ModelFolder(tmp_path / "new"))
    both = {name: [image_bytes(name, seed) for seed in range(6)] for name in (TULIP, DAISY)}
    contents = [content for each in both.values() for content in each]
    classes = [name for name in both for _ in range(6)]
    begun = client.post("/api/teach", files=files(*contents, b"none"), data={"classes": [*classes, TULIP]})
    job = wait_for_job(client, begun.json()["id"])
    assert job["state"] == "done", job
    assert job["result"]["new"] == {TULIP: 6, DAISY: 6}
    (left,) = job["result"]["skipped"]
    assert left["path"] == "12.png"
    model = client.get("/api/model").json()
    assert (model["image_size"], model["network"]) == (224, "efficientnet-lite0")
    result = job["result"]
    assert result["network"] == "efficientnet-lite0" and result["tuned"] is False
    assert (result["held_out"], result["held_out_classes"]) == (12, 2) and result["accuracy"] is not None
    low, high = result["interval"]
    assert 0 <= low < result["accuracy"] <= high <= 1
    assert (model["accuracy"], model["interval"]) == (result["accuracy"], result["interval"])
    assert model["classifier"] == result["classifier"] and model["held_out_counts"]["total"] == [6, 6]
    assert result["warnings"] == [] and result["estimated"] is False


def test_an_update_fails_if_no_image_of_a_class_is_readable(client: TestClient) -> None:
    begun = client.post("/api/teach", files=files(b"one", b"two"), data={"classes": ["a", "a"]})
    job = wait_for_job(client, begun.json()["id"])
    assert job["state"] == "failed"
    assert "class 'a'" in job["problem"]
    assert client.get("/readyz").json()["version"] == 2


@pytest.mark.parametrize("called", [".", "ulip", "red"])
def test_messages_hide_the_path_of_the_model_and_nothing_else(
    called: str, small_model: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    path = copied(small_model, tmp_path / ("model" if called == "." else called)).path
    monkeypatch.chdir(path if called == "." else tmp_path)
    client = serve(ModelFolder(Path(called)))
    response = client.post("/api/rename", json={"from": "[red]tulp", "to": "x"}).json()["detail"]
    assert "'[red]tulp'" in response and "'[red]tulip'" in response and "MODEL" not in response
    response = client.post("/api/rollback", json={"to": 77}).json()["detail"]
    assert "77" in response and "MODEL" in response and str(tmp_path) not in response
    response = client.post("/api/rename", json={"from": DAISY, "to": TULIP}).json()["detail"]
    assert f"engram merge MODEL '{DAISY}' '{TULIP}'" in response


def test_classes_are_renamed_merged_forgotten_and_rolled_back(client: TestClient) -> None:
    renamed = client.post("/api/rename", json={"from": TULIP, "to": "tulip"}).json()
    assert (renamed["version"], renamed["classes"][0]) == (3, "tulip")
    back = client.post("/api/rollback", json={"to": None}).json()
    assert (back["version"], back["classes"][0]) == (2, TULIP)
    assert client.post("/api/rollback", json={"to": 3}).json()["version"] == 3
    merged = client.post("/api/merge", json={"class": FORMULA, "into": "tulip"}).json()
    assert merged["classes"] == ["tulip", DAISY]
    forgotten = client.post("/api/forget", json={"classes": [DAISY]}).json()
    assert forgotten["classes"] == ["tulip"]
    response = client.post("/api/classify", files=files(image_bytes(TULIP))).json()
    assert response["version"] == forgotten["version"]
    assert [each["class"] for each in response["predictions"][0]["top"]] == ["tulip"]


@pytest.mark.parametrize(
    ("path", "body", "fact"),
    [
        ("forget", {"classes": ["tulp"]}, "'tulp'"),
        ("forget", {"classes": list(NAMES)}, "MODEL"),
        ("forget", {"classes": []}, "classes"),
        ("forget", [], "openapi"),
        ("rename", {"from": TULIP, "to": DAISY}, "engram merge MODEL"),
        ("rename", {"from": TULIP}, "to: "),
        ("merge", {"class": TULIP, "into": "x", "y": 1}, "y: "),
        ("rollback", {"to": 77}, "77"),
    ],
)
def test_an_invalid_edit_is_a_problem_without_a_path(
    shared_client: TestClient, path: str, body: object, fact: str
) -> None:
    response = shared_client.post(f"/api/{path}", json=body)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert fact in response.json()["detail"]
    assert "secret-place" not in response.text


def test_a_locked_model_is_not_edited(client: TestClient, model: ModelFolder) -> None:
    with model.writing():
        response = client.post("/api/rename", json={"from": TULIP, "to": "tulip"})
    assert response.status_code == 409
    assert "retry-after" in response.headers
    assert "secret-place" not in response.text


def test_an_internal_error_reveals_nothing(shared_client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.server.api.inspect", Mock(side_effect=RuntimeError("secret")))
    response = shared_client.get("/api/model")
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/problem+json"
    assert "secret" not in response.text and "Trace" not in response.text


def test_a_damaged_version_does_not_replace_an_intact_one(client: TestClient, model: ModelFolder) -> None:
    assert client.get("/readyz").json()["version"] == 2
    with not_loading(client):
        rename(model, TULIP, "tulip")
        tensors = next((model.path / "versions").glob("*3/*.safetensors"))
        tensors.chmod(0o644)
        tensors.write_bytes(tensors.read_bytes()[:-8] + b"damaged!")
    wait_until(lambda: client.get("/readyz").json() == {"version": 2, "damaged": 3})
    assert "engram_damaged 1.0" in client.get("/metrics").text
    client.post("/api/rollback", json={"to": 2})
    assert client.get("/readyz").json() == {"version": 2, "damaged": None}
    assert "engram_damaged 0.0" in client.get("/metrics").text


@pytest.fixture
def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.server.inference.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("engram.server.inference.RETRY_SHARE", math.inf)


@pytest.mark.usefixtures("retry_at_once")
def test_an_unreadable_version_is_tried_again(client: TestClient, model: ModelFolder) -> None:
    assert client.get("/readyz").json()["version"] == 2
    with not_loading(client):
        rename(model, TULIP, "tulip")
        tensors = next((model.path / "versions").glob("*3/*.safetensors"))
        away = tensors.rename(model.path.parent / "away")
    wait_until(lambda: client.get("/readyz").json() == {"version": 2, "damaged": 3})
    away.rename(tensors)
    wait_until(lambda: client.get("/readyz").json() == {"version": 3, "damaged": None})


@pytest.mark.usefixtures("retry_at_once")
def test_an_unreadable_first_version_is_tried_again(serve: Serve, model: ModelFolder) -> None:
    tensors = next((model.path / "versions").glob("*2/*.safetensors"))
    away = tensors.rename(model.path.parent / "away")
    client = serve()
    assert client.get("/readyz").status_code == 503
    away.rename(tensors)
    wait_until(lambda: client.get("/readyz").status_code == 200)


def test_a_damaged_version_is_not_loaded_at_every_request(serve: Serve, model: ModelFolder) -> None:
    next((model.path / "versions").glob("*2/*.safetensors")).unlink()
    client = serve()
    assert client.get("/readyz").status_code == 503
    client.app.state.services.loader._load = load_again = Mock()  # type: ignore[attr-defined]
    assert client.get("/readyz").status_code == 503
    assert not load_again.called


def classified(client: TestClient) -> tuple[int, set[str]]:
    """The version that classifies an image, and its classes."""
    response = client.post("/api/classify", files=files(image_bytes(TULIP))).raise_for_status().json()
    return response["version"], {each["class"] for each in response["predictions"][0]["top"]}


def test_requests_do_not_wait_while_a_version_is_loaded(client: TestClient, model: ModelFolder) -> None:
    assert classified(client) == (2, set(NAMES))
    with not_loading(client):
        rename(model, TULIP, "tulip")
        assert classified(client) == (2, set(NAMES))
        assert client.get("/readyz").json() == {"version": 2, "damaged": None}
    wait_until(lambda: classified(client) == (3, {"tulip", DAISY, FORMULA}))


def test_an_update_is_done_when_its_version_answers(client: TestClient) -> None:
    assert classified(client) == (2, set(NAMES))
    id = client.post("/api/teach", **update_form("grey")).json()["id"]
    with not_loading(client):
        wait_until(lambda: client.get("/api/model").json()["version"] == 3)
        assert classified(client) == (2, set(NAMES))
        assert client.get(f"/api/jobs/{id}").json()["state"] == "learning"
    wait_for_job(client, id)
    assert classified(client) == (3, {*NAMES, "grey"})


def test_a_class_that_another_process_forgot_never_answers(client: TestClient, model: ModelFolder) -> None:
    assert classified(client) == (2, set(NAMES))
    with ThreadPoolExecutor(1) as threads:
        with not_loading(client):
            forget(model, [TULIP])
            waiting = threads.submit(classified, client)
            assert not wait([waiting], timeout=0.5).done
        assert waiting.result() == (3, {DAISY, FORMULA})


def test_a_class_that_was_forgotten_never_answers_even_if_the_model_is_damaged(
    client: TestClient, model: ModelFolder
) -> None:
    assert classified(client) == (2, set(NAMES))
    with not_loading(client):
        forget(model, [TULIP])
        next((model.path / "versions").glob("*3/*.safetensors")).unlink()
    assert client.post("/api/classify", files=files(image_bytes(TULIP))).status_code == 503


def test_images_that_are_classified_while_a_class_is_forgotten_are_refused(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, finish = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> list[Answer]:
        begun.set()
        finish.wait(60)
        return answers(*arguments)

    monkeypatch.setattr("engram.server.inference.answers", slow)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.post, "/api/classify", files=files(image_bytes(TULIP)))
        begun.wait(60)
        assert client.post("/api/forget", json={"classes": [TULIP]}).status_code == 200
        finish.set()
        assert (waiting.result().status_code, waiting.result().headers["retry-after"]) == (503, "1")
    assert classified(client) == (3, {DAISY, FORMULA})


def test_a_response_comes_from_one_version_while_the_model_changes(client: TestClient, model: ModelFolder) -> None:
    """Each version has one name for the class: an answer with another one would be of two."""
    stop = threading.Event()

    def change() -> None:
        old, number = TULIP, 0
        while not stop.wait(0.05):
            number += 1
            old, new = f"tulip {number}", old
            rename(model, new, old)

    names: dict[int, set[str]] = {}
    writer = threading.Thread(target=change)
    writer.start()
    try:
        while len(names) < 4:
            response = client.post("/api/classify", files=files(*(image_bytes(TULIP, seed) for seed in range(6))))
            if response.status_code == 503:  # its version was deleted meanwhile
                assert response.headers["retry-after"] == "1"
                continue
            answer = response.json()
            seen = {next(e["class"] for e in p["top"] if "tulip" in e["class"]) for p in answer["predictions"]}
            assert len(seen) == 1
            names.setdefault(answer["version"], set()).update(seen)
    finally:
        stop.set()
        writer.join()
    assert all(len(each) == 1 for each in names.values())


def test_the_page_and_the_openapi_document_are_served_and_no_other_file(shared_client: TestClient) -> None:
    assert shared_client.get("/").headers["content-type"].startswith("text/html")
    assert shared_client.get("/openapi.json").json()["info"]["title"] == "engram"
    assert shared_client.get("/docs").status_code == 404
    assert shared_client.get("/static/../app.py").status_code == 404
    assert shared_client.get("/static/%2e%2e/app.py").status_code == 404


def test_metrics_count_requests_and_images(client: TestClient) -> None:
    client.post("/api/classify", files=files(image_bytes(TULIP), b"none"))
    client.get("/made/up")
    text = client.get("/metrics").text
    assert 'engram_images_total{outcome="answered"} 1.0' in text
    assert 'engram_images_total{outcome="unreadable"} 1.0' in text
    assert 'engram_requests_total{method="POST",path="/api/classify",status="200"} 1.0' in text
    assert "engram_model_version 2.0" in text
    assert "made" not in text
