"""What the server answers: of pictures, of the model, after lessons and changes."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
from models_made import DAISY, FORMULA, NAMES, TULIP, copied
from server_made import Serve, files, lesson, over, picture
from starlette.testclient import TestClient

from engram.data.images import decode
from engram.model import ModelFolder, inspect, load, rename, top_classes


def test_pictures_are_classified_as_the_model_does(client: TestClient, model: ModelFolder) -> None:
    contents = [picture(name) for name in NAMES]
    said = client.post("/api/classify?top=2&reject=0", files=files(*contents))
    assert said.status_code == 200
    assert said.json()["generation"] == model.current().generation
    loaded = load(model, device="cpu")
    for number, (content, prediction) in enumerate(zip(contents, said.json()["predictions"], strict=True)):
        (expected,) = top_classes(loaded, decode(content, size=16)[None], top=2)
        assert prediction["name"] == f"{number}.png"
        assert [each["class"] for each in prediction["top"]] == [each.name for each in expected]
        probabilities = [each["probability"] for each in prediction["top"]]
        assert probabilities == pytest.approx([each.probability for each in expected], abs=1e-4)
        assert prediction["rejected"] is False


def test_what_is_less_sure_than_asked_for_is_rejected(serve: Serve, calibrated_model: ModelFolder) -> None:
    said = serve(calibrated_model).post("/api/classify?reject=1", files=files(picture("grey"))).json()
    assert said["calibrated"] is True and said["predictions"][0]["rejected"] is True


def test_nothing_is_rejected_by_probabilities_that_were_never_calibrated(client: TestClient) -> None:
    said = client.post("/api/classify", files=files(picture("grey"))).json()
    assert said["calibrated"] is False and said["predictions"][0]["rejected"] is False
    refused = client.post("/api/classify?reject=0.5", files=files(picture("grey")))
    assert refused.status_code == 409 and "calibrated" in refused.json()["detail"]


def test_what_cannot_be_read_is_said_and_the_others_are_answered(client: TestClient) -> None:
    said = client.post("/api/classify", files=files(b"no picture", picture(TULIP))).json()["predictions"]
    assert said[0] == {"name": "0.png", "problem": said[0]["problem"]}
    assert "It is text" in said[0]["problem"]
    assert said[1]["top"]


def test_a_model_that_is_not_there_is_told_so(serve: Serve, tmp_path: Path) -> None:
    client = serve(ModelFolder(tmp_path / "none"))
    assert client.get("/livez").status_code == 200
    assert client.get("/readyz").status_code == 503
    assert client.get("/api/model").status_code == 404
    said = client.post("/api/classify", files=files(picture(TULIP)))
    assert said.status_code == 503
    assert said.headers["content-type"] == "application/problem+json"
    assert said.json()["detail"] == "There is no model yet. Teach it some pictures."
    for path, body in (("forget", {"classes": ["a"]}), ("rollback", {})):
        assert client.post(f"/api/{path}", json=body).status_code == 404
    assert not (tmp_path / "none").exists()


def test_the_model_is_told_as_inspect_does(client: TestClient, model: ModelFolder) -> None:
    told = client.get("/api/model").json()
    assert told["generation"] == 2
    assert [each["name"] for each in told["classes"]] == [each.name for each in inspect(model).classes]
    assert client.get("/readyz").json()["generation"] == 2


def test_a_class_that_is_taught_is_known(client: TestClient) -> None:
    assert client.get("/readyz").json()["generation"] == 2
    begun = client.post("/api/teach", **lesson("grey"))
    assert begun.status_code == 202
    assert begun.json()["state"] in ("queued", "learning")
    assert begun.json()["classes"] == {"grey": 8}
    assert set(begun.json()["progress"]) == {"phase", "done", "of", "seconds_left"}
    job = over(client, begun.json()["id"])
    assert (job["state"], job["problem"]) == ("done", None)
    assert job["result"]["new"] == {"grey": 8}
    assert {each["name"] for each in job["result"]["class_accuracies"]} == {*NAMES, "grey"}
    said = client.post("/api/classify", files=files(picture("grey", 99))).json()
    assert said["generation"] == job["result"]["generation"] == 3
    assert said["predictions"][0]["top"][0]["class"] == "grey"
    assert [each["id"] for each in client.get("/api/jobs").json()["jobs"]] == [job["id"]]


def test_a_single_class_is_taught_without_training_and_put_in_use(serve: Serve) -> None:
    client = serve(epochs=None)
    job = over(client, client.post("/api/teach", **lesson("grey")).json()["id"])
    assert job["state"] == "done", job
    assert client.get("/readyz").json() == {"generation": 3, "damaged": None}
    assert client.post("/api/forget", json={"classes": ["grey"]}).status_code == 200


def test_the_first_lesson_makes_the_model(serve: Serve, tmp_path: Path) -> None:
    client = serve(ModelFolder(tmp_path / "new"))
    both = {name: [picture(name, seed) for seed in range(6)] for name in (TULIP, DAISY)}
    contents = [content for each in both.values() for content in each]
    classes = [name for name in both for _ in range(6)]
    begun = client.post("/api/teach", files=files(*contents, b"none"), data={"classes": [*classes, TULIP]})
    job = over(client, begun.json()["id"])
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


def test_a_class_of_which_nothing_can_be_read_fails_the_lesson(client: TestClient) -> None:
    begun = client.post("/api/teach", files=files(b"one", b"two"), data={"classes": ["a", "a"]})
    job = over(client, begun.json()["id"])
    assert job["state"] == "failed"
    assert "class 'a'" in job["problem"]
    assert client.get("/readyz").json()["generation"] == 2


@pytest.mark.parametrize("called", [".", "ulip", "red"])
def test_where_the_model_lies_is_told_no_one_and_nothing_else_is_taken_for_it(
    called: str, small_model: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    path = copied(small_model, tmp_path / ("model" if called == "." else called)).path
    monkeypatch.chdir(path if called == "." else tmp_path)
    client = serve(ModelFolder(Path(called)))
    said = client.post("/api/rename", json={"from": "[red]tulp", "to": "x"}).json()["detail"]
    assert said == "There is no class '[red]tulp'. Did you mean '[red]tulip'?"
    said = client.post("/api/rollback", json={"to": 77}).json()["detail"]
    assert said == "There is no generation 77 in MODEL. There are: 1, 2."
    said = client.post("/api/rename", json={"from": DAISY, "to": TULIP}).json()["detail"]
    assert said.endswith(f"engram merge MODEL '{DAISY}' '{TULIP}'")


def test_classes_are_renamed_joined_forgotten_and_changes_undone(client: TestClient) -> None:
    renamed = client.post("/api/rename", json={"from": TULIP, "to": "tulip"}).json()
    assert (renamed["generation"], renamed["classes"][0]) == (3, "tulip")
    back = client.post("/api/rollback", json={"to": None}).json()
    assert (back["generation"], back["classes"][0]) == (2, TULIP)
    assert client.post("/api/rollback", json={"to": 3}).json()["generation"] == 3
    merged = client.post("/api/merge", json={"class": FORMULA, "into": "tulip"}).json()
    assert merged["classes"] == ["tulip", DAISY]
    forgotten = client.post("/api/forget", json={"classes": [DAISY]}).json()
    assert forgotten["classes"] == ["tulip"]
    said = client.post("/api/classify", files=files(picture(TULIP))).json()
    assert said["generation"] == forgotten["generation"]
    assert [each["class"] for each in said["predictions"][0]["top"]] == ["tulip"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("forget", {"classes": ["tulp"]}, 422, "There is no class 'tulp'"),
        ("forget", {"classes": list(NAMES)}, 422, "No class would be left"),
        ("forget", {"classes": []}, 422, "classes"),
        ("forget", [], 422, "openapi"),
        ("rename", {"from": TULIP, "to": DAISY}, 422, "There is a class"),
        ("rename", {"from": TULIP}, 422, "to: Field required"),
        ("merge", {"class": TULIP, "into": "x", "y": 1}, 422, "y"),
        ("rollback", {"to": 77}, 422, "There is no generation 77"),
    ],
)
def test_what_cannot_be_done_is_a_problem_without_a_path(
    client: TestClient, path: str, body: object, status: int, words: str
) -> None:
    said = client.post(f"/api/{path}", json=body)
    assert said.status_code == status
    assert said.headers["content-type"] == "application/problem+json"
    assert words in said.json()["detail"]
    assert "secret-place" not in said.text


def test_a_model_that_is_being_written_is_not_changed(client: TestClient, model: ModelFolder) -> None:
    with model.writing():
        said = client.post("/api/rename", json={"from": TULIP, "to": "tulip"})
    assert said.status_code == 409
    assert "retry-after" in said.headers
    assert "secret-place" not in said.text


def test_an_error_that_nobody_foresaw_tells_nothing(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("engram.server.api.inspect", broken)
    said = client.get("/api/model")
    assert said.status_code == 500
    assert said.headers["content-type"] == "application/problem+json"
    assert "secret" not in said.text and "Trace" not in said.text


def test_a_damaged_generation_does_not_take_the_place_of_a_whole_one(client: TestClient, model: ModelFolder) -> None:
    assert client.get("/readyz").json()["generation"] == 2
    rename(model, TULIP, "tulip")
    tensors = next((model.path / "generations").glob("*3/*.safetensors"))
    tensors.chmod(0o644)
    tensors.write_bytes(tensors.read_bytes()[:-8] + b"damaged!")
    assert client.get("/readyz").json() == {"generation": 2, "damaged": 3}
    assert "engram_damaged 1.0" in client.get("/metrics").text
    client.post("/api/rollback", json={"to": 2})
    assert client.get("/readyz").json() == {"generation": 2, "damaged": None}
    assert "engram_damaged 0.0" in client.get("/metrics").text


@pytest.mark.parametrize("another_answers", [False, True])
def test_a_generation_that_could_not_be_read_is_tried_again(
    client: TestClient, model: ModelFolder, monkeypatch: pytest.MonkeyPatch, another_answers: bool
) -> None:
    monkeypatch.setattr("engram.server.inference.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("engram.server.inference.RETRY_SHARE", math.inf)
    if another_answers:
        assert client.get("/readyz").json()["generation"] == 2
    rename(model, TULIP, "tulip")
    tensors = next((model.path / "generations").glob("*3/*.safetensors"))
    away = tensors.rename(model.path.parent / "away")
    said = client.get("/readyz")
    assert (said.status_code, said.json().get("damaged")) == ((200, 3) if another_answers else (503, None))
    away.rename(tensors)
    assert client.get("/readyz").json() == {"generation": 3, "damaged": None}


def test_a_damaged_generation_is_not_read_at_every_request(client: TestClient, model: ModelFolder) -> None:
    next((model.path / "generations").glob("*2/*.safetensors")).unlink()
    assert client.get("/readyz").status_code == 503
    tries: list[bool] = []
    client.app.state.services.loader._load = lambda: tries.append(True)  # type: ignore[attr-defined]
    assert client.get("/readyz").status_code == 503
    assert not tries


def test_an_answer_is_of_one_generation_while_they_change(client: TestClient, model: ModelFolder) -> None:
    """Each generation has one name for the class: an answer with another one would be of two."""
    stop = threading.Event()

    def change() -> None:
        old, number = TULIP, 0
        while not stop.is_set():
            number += 1
            old, new = f"tulip {number}", old
            rename(model, new, old)

    names: dict[int, set[str]] = {}
    writer = threading.Thread(target=change)
    writer.start()
    try:
        for _ in range(12):
            said = client.post("/api/classify", files=files(*(picture(TULIP, seed) for seed in range(6)))).json()
            seen = {next(e["class"] for e in p["top"] if "tulip" in e["class"]) for p in said["predictions"]}
            assert len(seen) == 1
            names.setdefault(said["generation"], set()).update(seen)
    finally:
        stop.set()
        writer.join()
    assert all(len(each) == 1 for each in names.values())
    assert len(names) > 1


def test_the_page_and_the_description_are_there(client: TestClient) -> None:
    assert client.get("/").headers["content-type"].startswith("text/html")
    assert client.get("/openapi.json").json()["info"]["title"] == "engram"
    assert client.get("/docs").status_code == 404
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/%2e%2e/app.py").status_code == 404


def test_numbers_are_told(client: TestClient) -> None:
    client.post("/api/classify", files=files(picture(TULIP), b"none"))
    client.get("/made/up")
    text = client.get("/metrics").text
    assert 'engram_pictures_total{outcome="answered"} 1.0' in text
    assert 'engram_pictures_total{outcome="unreadable"} 1.0' in text
    assert 'engram_requests_total{method="POST",path="/api/classify",status="200"} 1.0' in text
    assert "engram_generation 2.0" in text
    assert "made" not in text
