"""`export`: ONNX with the same predictions, arrays for numpy, weights to start from."""

import copy
import dataclasses
import errno
import functools
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from learners_made import learned
from safetensors import safe_open
from torch import Tensor
from torch.onnx._internal.exporter._registration import ONNXRegistry

from engram.data import Samples, Stream, Task
from engram.errors import DataError, EngramError, UsageError
from engram.experiments.folder import RunProgress
from engram.features import CLASSIFIERS, Ridge
from engram.methods import Learner, make
from engram.model import Calibration, Metadata, Model, ModelFolder, export, load, save
from engram.model.exporting import OPSET, ExportResult, metadata
from engram.network import HEADS, CorrectedHead, extractor_for_weights, make_network
from engram.progress import SILENT

BATCHES = (1, 2, 7)


def named(learner: Learner, temperature: float = 1.7) -> Model:
    """The learner as a model whose classes have names that are not ASCII and not in order."""
    names = tuple(
        f"Größe {len(learner.classes_) - class_index}, „{class_index}“" for class_index in range(len(learner.classes_))
    )
    facts = Metadata(seen=(24,) * len(names), calibration=Calibration(temperature=temperature))
    return Model(learner, names, facts)


def inputs_of(stream: Stream) -> Tensor:
    samples = stream.tasks[0].test
    return samples.batch(torch.arange(0, len(samples), 2)[: max(BATCHES)])


def answered(path: Path, inputs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = [each.name for each in session.get_inputs()]
    scores, probabilities = session.run(["scores", "probabilities"], {name: inputs.numpy()})
    return scores, probabilities


def assert_answers_alike(path: Path, model: Model, inputs: Tensor) -> None:
    for size in BATCHES:
        scores, probabilities = answered(path, inputs[:size])
        expected = model.scores(inputs[:size]).numpy()
        assert scores.shape == expected.shape and scores.dtype == probabilities.dtype == np.float32
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(probabilities, model.probabilities(inputs[:size]), rtol=0, atol=1e-4)
        assert np.ptp(scores, axis=1).min() > 1e-3  # equal scores would match anything


@pytest.fixture(scope="module", autouse=True)
def _one_library() -> Iterator[None]:
    """Let the exporter parse five hundred functions of onnxscript once: that takes half of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield


def alone(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def features(images: Stream) -> Model:
    return named(learned("features", images))


@pytest.fixture(scope="module")
def hybrid(images: Stream) -> Model:
    return named(learned("hybrid", images))


# ONNX


METHOD_OF_HEAD = {"cosine": "gamma-lwf", "linear": "lwf", "corrected": "bic", "shifted": "il2m"}


@pytest.mark.parametrize("head", HEADS)
def test_onnx_matches_every_head(head: str, vectors: Stream, tmp_path: Path) -> None:
    learner = learned(METHOD_OF_HEAD[head], vectors)
    assert type(learner.trained.head) is HEADS[head] and learner.classifier_ is None
    if isinstance(learner.trained.head, CorrectedHead):  # so small a task leaves little to correct
        learner.trained.head.correct(1.5, -0.7, torch.tensor([False, True, False, True, True, False]))
    model, inputs = named(learner), inputs_of(vectors)
    exported = export(model, tmp_path / "model.onnx")
    assert alone(tmp_path) == ["model.onnx"]  # the weights are inside
    assert exported.bytes == (tmp_path / "model.onnx").stat().st_size
    assert exported.contents["input"] == "vectors" and exported.contents["shape"] == ["batch", 12]
    assert_answers_alike(tmp_path / "model.onnx", model, inputs)


# One classifier for each way to compute scores; "auto" scores as the one it has chosen.
SCORED_DIFFERENTLY = sorted({each.scores: name for name, each in CLASSIFIERS.items()}.values())


@pytest.mark.parametrize("classifier", SCORED_DIFFERENTLY)
def test_onnx_matches_every_classifier(classifier: str, vectors: Stream, tmp_path: Path) -> None:
    model = named(learned("features", vectors, classifier=classifier), temperature=0.05)
    assert isinstance(model.learner.classifier_, CLASSIFIERS[classifier])
    export(model, tmp_path / "model.onnx")
    assert_answers_alike(tmp_path / "model.onnx", model, inputs_of(vectors))


@pytest.mark.parametrize("network", ["resnet32", "resnet18"])
def test_onnx_matches_deep_networks(network: str, images: Stream, tmp_path: Path) -> None:
    task = images.tasks[0]
    larger = task.train.batch(torch.arange(12)).repeat_interleave(4, dim=1).repeat_interleave(4, dim=2)
    samples = Samples.of(larger, torch.arange(12) % 2)
    learner = make("features", network=network, epochs=2, batch_size=4, learning_rate=0.1, features_per_class=4)
    learner.learn(Task(0, (0, 1), samples, samples))
    export(named(learner), tmp_path / "model.onnx")
    assert_answers_alike(tmp_path / "model.onnx", named(learner), larger[:7])


def test_onnx_matches_a_pretrained_network_in_float32(
    images: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its images are resized inside the graph, and the file computes in float32 even where engram uses bfloat16."""
    model = named(learned("features", images, network="efficientnet-lite0", tune="none", classifier="ridge"))
    exported = export(model, tmp_path / "model.onnx")
    assert alone(tmp_path) == ["model.onnx"] and exported.bytes > 13_000_000  # the weights are inside
    assert exported.contents["shape"] == ["batch", 8, 8, 3]
    onnx.checker.check_model(onnx.load(exported.path), full_check=True)
    monkeypatch.setattr("engram.network.network.has_bfloat16", lambda device: False)
    exact = copy.copy(model.learner)
    exact.network_ = copy.deepcopy(exact.trained)  # without cached tensors
    assert next(exact.frozen_network.extractor.parameters()).dtype == torch.float32
    assert_answers_alike(exported.path, dataclasses.replace(model, learner=exact), inputs_of(images))


def test_onnx_crops_the_centre(images: Stream, tmp_path: Path) -> None:
    model = named(learned("features", images, crop=6))
    export(model, tmp_path / "model.onnx")
    assert_answers_alike(tmp_path / "model.onnx", model, inputs_of(images))
    borders = inputs_of(images).clone()
    borders[:, 0] = borders[:, :, -1] = 0
    assert torch.equal(model.scores(borders), model.scores(inputs_of(images)))


@pytest.fixture(scope="module")
def graph(features: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(features, tmp_path_factory.mktemp("graph") / "model.onnx", version=3).path


def test_onnx_file_contains_its_metadata(features: Model, graph: Path) -> None:
    whole = onnx.load(graph)
    onnx.checker.check_model(whole, full_check=True)
    written = {each.key: each.value for each in whole.metadata_props}
    assert json.loads(written["engram.classes"]) == list(features.names)
    assert float(written["engram.temperature"]) == 1.7
    assert (written["engram.image_size"], written["engram.version"], written["engram.method"]) == (
        "8",
        "3",
        "features",
    )
    assert "shorter side scaled to 8 with bicubic, middle square, RGB, uint8" in written["engram.preparation"]
    assert [(each.domain, each.version) for each in whole.opset_import] == [("", OPSET)]
    (given,) = whole.graph.input
    sizes = [each.dim_param or each.dim_value for each in given.type.tensor_type.shape.dim]
    assert (given.name, given.type.tensor_type.elem_type) == ("images", onnx.TensorProto.UINT8)
    assert sizes == ["batch", 8, 8, 3]
    assert [each.name for each in whole.graph.output] == ["scores", "probabilities"]


def test_onnx_metadata_of_vectors_does_not_mention_images(features: Model) -> None:
    grey, vectors = copy.copy(features.learner), copy.copy(features.learner)
    grey.shape_, vectors.shape_ = (8, 8, 1), (12,)
    written = metadata(dataclasses.replace(features, learner=grey))
    assert written["engram.preparation"] == "As they were learned: uint8 images (height, width, channels) of (8, 8, 1)."
    written = metadata(dataclasses.replace(features, learner=vectors))
    assert written["engram.preparation"] == "As they were learned: float32 vectors of (12,)."
    assert "engram.image_size" not in written and "engram.version" not in written


def test_export_is_deterministic_silent_and_changes_nothing(
    features: Model,
    graph: Path,
    images: Stream,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    before = {name: tensor.clone() for name, tensor in features.learner.state().items()}
    scores = features.scores(inputs_of(images))
    export(features, tmp_path / "model.onnx", version=3)
    assert (tmp_path / "model.onnx").read_bytes() == graph.read_bytes()
    assert capfd.readouterr() == ("", "") and not recwarn.list
    after = features.learner.state()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()) and len(before) == len(after)
    assert torch.equal(features.scores(inputs_of(images)), scores)


def test_onnx_file_contains_no_local_path(graph: Path) -> None:
    content = graph.read_bytes()
    for trace in (b"site-packages", b"engram/network", str(Path(__file__).parents[2]).encode()):
        assert trace not in content


def test_missing_extra_is_named(features: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngramError, match=r"onnx and onnxscript .*\[export\]"):
        export(features, tmp_path / "model.onnx")
    assert alone(tmp_path) == []
    export(features, tmp_path / "model.npz")  # needs no extra


def test_unsupported_network_is_refused(vectors: Stream, tmp_path: Path) -> None:
    class Whimsical(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.detach().sum()) > 0 else -super().forward(x)

    model = named(learned("lwf", vectors, network=Whimsical(12, 8)))
    with pytest.raises(EngramError, match="ONNX"):
        export(model, tmp_path / "model.onnx")
    assert alone(tmp_path) == []


# Arrays


def test_stored_features_are_exported_with_their_labels(features: Model, tmp_path: Path) -> None:
    exported = export(features, tmp_path / "memory.npz")
    memory = features.learner.memory.features
    with np.load(tmp_path / "memory.npz", allow_pickle=False) as arrays:
        assert sorted(arrays) == ["classes", "features", "labels"]
        assert arrays["features"].dtype == np.float32 and arrays["labels"].dtype == np.int64
        assert np.array_equal(arrays["features"], memory.rows)
        assert np.bincount(arrays["labels"]).tolist() == [8] * 4
        assert arrays["classes"].dtype.kind == "U" and tuple(arrays["classes"].tolist()) == features.names
        # Labels are the columns of the scores: a classifier fitted to the file alone has the same weights.
        again = Ridge().fit(torch.from_numpy(arrays["features"]), torch.from_numpy(arrays["labels"]))
    assert torch.equal(again.weight_, Ridge().fit(memory.rows, memory.class_indices).weight_)
    assert exported.to_json() == {
        **{"path": str(tmp_path / "memory.npz"), "kind": "npz", "bytes": (tmp_path / "memory.npz").stat().st_size},
        **{"version": None, "features": 32, "images": 0, "classes": features.names},
    }


def test_exemplars_are_exported_if_there_are_any(hybrid: Model, images: Stream, tmp_path: Path) -> None:
    export(hybrid, tmp_path / "memory.npz")
    with np.load(tmp_path / "memory.npz", allow_pickle=False) as arrays:
        assert arrays["features"].shape == (32, 64)
        assert arrays["images"].shape == (20, 8, 8, 3) and arrays["images"].dtype == np.uint8
        for image, label in zip(arrays["images"], arrays["image_labels"], strict=True):
            samples = images.tasks[label // 2].train
            alike = (samples.batch(torch.arange(len(samples))) == torch.from_numpy(image)).flatten(1).all(dim=1)
            assert samples.labels[alike].tolist() == [hybrid.learner.classes_[label]]


def test_exemplars_alone_are_exported_with_an_empty_feature_array(images: Stream, tmp_path: Path) -> None:
    export(named(learned("icarl", images)), tmp_path / "memory.npz")
    with np.load(tmp_path / "memory.npz", allow_pickle=False) as arrays:
        assert arrays["features"].shape == (0, 64) and arrays["labels"].shape == (0,)
        assert len(arrays["images"]) == len(arrays["image_labels"]) > 0


def test_a_model_without_memory_cannot_be_exported_as_npz(images: Stream, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'lwf'"):
        export(named(learned("lwf", images)), tmp_path / "memory.npz")
    assert alone(tmp_path) == []


# Weights


def test_a_new_learner_from_exported_weights_has_the_same_features(features: Model, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    export(features, file)
    assert extractor_for_weights(file) == "small"
    with safe_open(file, "pt") as tensors:
        own = features.learner.trained.extractor.state_dict()
        assert set(tensors.keys()) == {*own, "input.mean", "input.std"}
    # A new learner starts with this network, even if its images differ from those that were learned.
    others = Samples.of(torch.randint(0, 90, (9, 8, 8, 3), dtype=torch.uint8), torch.zeros(9, dtype=torch.int64))
    begun = make_network("auto", "cosine", others, seed=7, weights=str(file))
    assert torch.equal(begun.frozen().features(others.inputs), features.learner.extract(others))


@pytest.mark.parametrize("grey", [True, False], ids=["grey", "vectors"])
def test_weights_for_grey_images_and_vectors_bring_their_statistics_too(
    grey: bool, images: Stream, vectors: Stream, tmp_path: Path
) -> None:
    task = (images if grey else vectors).tasks[0]
    inputs = task.train.batch(torch.arange(len(task.train)))
    inputs = inputs[..., :1] if grey else inputs
    samples = Samples.of(inputs, torch.arange(len(inputs)) % 2)
    learner = make("features", epochs=1, batch_size=8, features_per_class=4)
    learner.learn(Task(0, (0, 1), samples, samples))
    export(named(learner), tmp_path / "weights.safetensors")
    others = Samples.of(inputs[:9] // 2, samples.labels[:9])
    begun = make_network("auto", "cosine", others, seed=7, weights=str(tmp_path / "weights.safetensors"))
    assert torch.equal(begun.frozen().features(others.inputs), learner.extract(others))


# Where it is written


def test_unknown_suffix_is_refused_with_the_three_known(features: Model, tmp_path: Path) -> None:
    for name in ("model.pt", "model", ".onnx", "model.onnx.zip"):
        with pytest.raises(UsageError, match=r"\.onnx .*\.npz .*\.safetensors"):
            export(features, tmp_path / name)
    assert alone(tmp_path) == []
    assert export(features, tmp_path / "deep" / "er" / "MODEL.NPZ").kind == "npz"


@pytest.fixture
def made_already(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was made before, for tests that are not about its content."""
    monkeypatch.setattr("engram.model.exporting.make_graph", lambda model, version: onnx.load(graph))


@pytest.mark.usefixtures("made_already")
@pytest.mark.parametrize("ending", ["onnx", "npz", "safetensors"])
def test_existing_file_is_kept_unless_overwrite_is_requested(ending: str, features: Model, tmp_path: Path) -> None:
    place = tmp_path / f"model.{ending}"
    place.write_text("mine")
    with pytest.raises(UsageError, match=r"exists already.*--overwrite"):
        export(features, place)
    assert place.read_text() == "mine"
    assert export(features, place, overwrite=True).bytes == place.stat().st_size > 4
    assert alone(tmp_path) == [place.name]


def test_folder_and_dangling_link_are_refused(features: Model, tmp_path: Path) -> None:
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "link.npz").symlink_to(tmp_path / "nowhere")
    for name, overwrite, message in (("folder.npz", True, "is a folder"), ("link.npz", False, "exists already")):
        with pytest.raises(UsageError, match=message):
            export(features, tmp_path / name, overwrite=overwrite)
    assert (tmp_path / "link.npz").is_symlink() and not (tmp_path / "nowhere").exists()


def test_nothing_is_written_into_a_models_own_folder(features: Model, tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "model")
    with folder.writing() as writer:
        save(writer, features, action="learn")
    for place in (folder.path / "model.npz", folder.path / "versions" / "new" / "model.npz"):
        with pytest.raises(UsageError, match=r"inside the model"):
            export(load(folder), place)
    (tmp_path / "link").symlink_to(folder.path / "versions")
    with pytest.raises(UsageError, match=r"would lie inside the model"):
        export(load(folder), tmp_path / "link" / "model.npz")
    export(load(folder), folder.path / ".." / "beside.npz")
    assert (tmp_path / "beside.npz").exists()
    assert folder.problems() == []


@pytest.mark.usefixtures("made_already")
@pytest.mark.parametrize("ending", ["onnx", "npz", "safetensors"])
def test_full_disk_leaves_the_existing_file(
    ending: str, features: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / f"model.{ending}"
    place.write_text("mine")

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("engram.storage.sync", full)
    with pytest.raises(EngramError, match=rf"model\.\w+ .*{os.strerror(errno.ENOSPC)}"):
        export(features, place, overwrite=True)
    assert alone(tmp_path) == [place.name] and place.read_text() == "mine"


def test_a_phase_is_reported(features: Model, tmp_path: Path) -> None:
    watch = RunProgress(SILENT, [])
    assert isinstance(export(features, tmp_path / "model.npz", progress=watch), ExportResult)
    assert list(watch.seconds) == ["export"]
