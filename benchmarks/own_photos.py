"""`engram learn` on photos of one's own, beside what a user would write instead, in one run.

    ENGRAM_DATA=… python benchmarks/own_photos.py SECTION...

accuracy  after each update, beside colour histogram + nearest mean, frozen network + nearest mean, frozen + LDA,
          and an SVM on everything at once; bytes, seconds
finetune  fine-tuning at every update (objects, draw 0, 30 photos a class)
trust     the accuracy that `learn` prints against test photos: six classes in three updates, 20 draws
scratch   the same where a network from scratch is trained at every update: the printed estimate against test photos
tuned     the same where the pretrained network is tuned at every update
herding   the same where only some of the photos are stored: does choosing them make the number optimistic?
classifiers  every classifier on features of the frozen network, with 5 to 100 photos a class
bytes     accuracy against bytes: features per class and codecs, and the photos themselves
unknown   "none of these" on photos of classes that were never taught: scores compared, and `--reject auto` (5 %)
          against what it states; 5 to 30 classes taught, 20 draws each
speed     an update of 150 photos against the bare forward pass of these photos, and that against plain eager mode

Photos: $ENGRAM_DATA/objects (40 classes of Caltech-101, 30 + 15 each, not ImageNet) and $ENGRAM_DATA/photos (12 classes
of ImageNet, 80 + 20 each, 84 pixels). The result of each section: benchmarks/results/own_photos-SECTION.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from engram.data import Samples
from engram.data.images import decode
from engram.features import LDA, Auto, Classifier, LinearSVM, NearestMean, RandomProjection, Ridge, Softmax
from engram.model import LearnOptions, ModelFolder, UpdateResult, evaluate, learn, load
from engram.model.held_out import Accuracy, ClassSimilarity, fit_temperature
from engram.network import extract, make_network
from engram.network.pretrained import load_efficientnet

DATA = Path(os.environ["ENGRAM_DATA"])
RESULTS = Path(__file__).parent / "results"
NETWORK = "efficientnet-lite0"
SIZE = 224

Photos = dict[str, list[Path]]  # of each class


def photos_of(dataset: str, part: str) -> Photos:
    if dataset == "tiny-imagenet-50":
        return tiny_imagenet(part)
    return {each.name: sorted(each.iterdir()) for each in sorted((DATA / dataset / part).iterdir())}


def tiny_imagenet(part: str) -> Photos:
    """100 photos of 64 pixels of each class, or all of the validation part; they are ImageNet's."""
    folder = DATA / "tiny-imagenet-50"
    if part == "train":
        return {each.name: sorted((each / "images").iterdir())[:100] for each in sorted((folder / "train").iterdir())}
    found: Photos = {}
    for line in (folder / "val" / "val_annotations.txt").read_text().splitlines():
        name, label = line.split("\t")[:2]
        if (folder / "val" / "images" / name).exists():
            found.setdefault(label, []).append(folder / "val" / "images" / name)
    return found


def drawn(dataset: str, draw: int, classes: int, per_class: int) -> tuple[Photos, Photos]:
    """Training photos, and test photos of the same classes, in an order of classes that goes by the draw."""
    train, test, draws = photos_of(dataset, "train"), photos_of(dataset, "test"), random.Random(draw)
    names = draws.sample(sorted(train), classes)
    return {name: draws.sample(train[name], per_class) for name in names}, {name: test[name] for name in names}


def updates_of(photos: Photos, per_update: int) -> list[Photos]:
    names = list(photos)
    return [{name: photos[name] for name in names[i : i + per_update]} for i in range(0, len(names), per_update)]


@contextmanager
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="own_photos-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def laid_out(folder: Path, photos: Photos) -> Path:
    """The photos as a user has them: a folder with a sub-folder per class."""
    for name, paths in photos.items():
        (folder / name).mkdir(parents=True)
        for path in paths:
            (folder / name / path.name).symlink_to(path)
    return folder


# Features, extracted once for all alternatives

_cache: dict[Path, Tensor] = {}


def features_of(photos: Photos) -> tuple[Tensor, list[str]]:
    """Unit features of the frozen network, and the class of each."""
    paths = [path for each in photos.values() for path in each]
    missing = [path for path in paths if path not in _cache]
    if missing:
        images = Samples.of(
            torch.stack([decode(path, size=SIZE) for path in missing]), torch.zeros(len(missing)).long()
        )
        found = extract(make_network(NETWORK, "cosine", images, seed=0), images)
        _cache.update(zip(missing, normalize(found), strict=True))
    return torch.stack([_cache[path] for path in paths]), [name for name, each in photos.items() for _ in each]


_histograms: dict[Path, Tensor] = {}


def histogram_of(photos: Photos) -> tuple[Tensor, list[str]]:
    """8 x 8 x 8 colour histograms of unit length."""
    paths = [path for each in photos.values() for path in each]
    for path in paths:
        if path not in _histograms:
            pixels = decode(path, size=64).long().flatten(0, 1) // 32  # (4096, 3)
            _histograms[path] = torch.bincount(pixels @ torch.tensor([64, 8, 1]), minlength=512).float().sqrt()
    rows = torch.stack([_histograms[path] for path in paths])
    return normalize(rows), [name for name, each in photos.items() for _ in each]


Labelled = tuple[Tensor, list[str]]


def score(classifier: Classifier, train: Labelled, test: Labelled) -> float:
    """Accuracy on test features. The classifiers are checked against scikit-learn's in the tests, and faster."""
    names = sorted(set(train[1]))
    labels, expected = (torch.tensor([names.index(name) for name in each[1]]) for each in (train, test))
    return float((classifier.fit(train[0], labels).scores(test[0]).argmax(1) == expected).double().mean())


# Ours


def taught(
    folder: Path, updates: Sequence[Photos], test: Photos, options: Sequence[LearnOptions] = ()
) -> Iterator[tuple[UpdateResult, float, int]]:
    """`engram learn`, update by update: what it said, accuracy on test photos of all classes so far, their number."""
    model, known = ModelFolder(folder / "model"), {}
    for number, update in enumerate(updates):
        source = laid_out(folder / f"update-{number}", update)
        learned = learn(model, source, options[min(number, len(options) - 1)] if options else None)
        known |= {name: test[name] for name in update}
        shutil.rmtree(folder / "test", ignore_errors=True)
        found = evaluate(load(model), laid_out(folder / "test", known))
        yield learned, found.accuracy, found.images


def accuracy() -> list[dict[str, Any]]:
    rows = []
    for dataset, classes, per_update in (("objects", 40, 5), ("photos", 12, 3)):
        for per_class in (5, 10, 30):
            for draw in range(4):
                train, test = drawn(dataset, draw, classes, per_class)
                row: dict[str, Any] = {"dataset": dataset, "per_class": per_class, "draw": draw}
                with place() as folder:
                    steps = list(taught(folder, updates_of(train, per_update), test))
                row["engram learn"] = [found for _, found, _ in steps]
                row["seconds"] = [round(learned.seconds, 2) for learned, _, _ in steps]
                row["stored_bytes"] = steps[-1][0].memory_bytes
                row["classifier"] = steps[-1][0].classifier
                known: Photos = {}
                alternatives: dict[str, list[float]] = {}
                for update in updates_of(train, per_update):
                    known |= update
                    of_known = {name: test[name] for name in known}
                    frozen, tested = features_of(known), features_of(of_known)
                    alternatives.setdefault("histogram, nearest mean", []).append(
                        score(NearestMean(), histogram_of(known), histogram_of(of_known))
                    )
                    alternatives.setdefault("frozen, nearest mean", []).append(score(NearestMean(), frozen, tested))
                    alternatives.setdefault("frozen, LDA", []).append(score(LDA(0.5), frozen, tested))
                    alternatives.setdefault("everything at once, SVM", []).append(score(LinearSVM(), frozen, tested))
                row |= alternatives
                rows.append(row)
                ends = {name: round(value[-1], 3) for name, value in row.items() if isinstance(value, list)}
                print(dataset, per_class, draw, json.dumps(ends), row["classifier"], flush=True)
    return rows


def finetune() -> dict[str, Any]:
    """All weights trained on the photos of each update alone, as a plain loop would."""
    train, test = drawn("objects", 0, 40, 30)
    plain = LearnOptions(
        method="finetune",
        tune="every",
        epochs=3,
        settings={"tuned_weights": "all", "learning_rate": 0.5, "precision": "bfloat16"},
    )
    with place() as folder:
        steps = list(taught(folder, updates_of(train, 5), test, [plain]))
    result = {"accuracy": [found for _, found, _ in steps], "seconds": [round(each.seconds, 1) for each, _, _ in steps]}
    print(json.dumps(result))
    return result


def trust(options: Sequence[LearnOptions] = (), draws: int = 20, per_class: int = 30) -> list[dict[str, Any]]:
    rows = []
    for draw in range(draws):
        train, test = drawn("objects", draw, 6, per_class)
        with place() as folder:
            for learned, found, tested in taught(folder, updates_of(train, 2), test, options):
                rows.append(output(draw, learned, found, tested))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def output(draw: int, learned: UpdateResult, found: float, tested: int) -> dict[str, Any]:
    """What was printed beside what test photos say, which are a sample too."""
    right = round(found * tested)
    truth = Accuracy(right, tested)
    row: dict[str, Any] = {"draw": draw, "classes": learned.classes, "test": found, "test_photos": tested}
    if learned.accuracy is None or learned.interval is None:
        return row | {"printed": None}
    low, high = learned.interval
    return row | {
        "printed": learned.accuracy,
        "interval": [low, high],
        "held_out": learned.held_out,
        "estimated": learned.estimated,
        "test_inside": low <= found <= high,
        "intervals_overlap": low <= truth.interval[1] and truth.interval[0] <= high,
    }


def scratch() -> list[dict[str, Any]]:
    """A network from scratch, trained at every update."""
    return trust([LearnOptions(network="resnet32", image_size=32), LearnOptions()], 2)


def tuned() -> list[dict[str, Any]]:
    """A pretrained network, tuned gently at every update."""
    first = LearnOptions(tune="every", epochs=10, settings={"precision": "bfloat16"})
    return trust([first, LearnOptions(epochs=10)], 1)


def herding() -> dict[str, Any]:
    """All 40 classes at once: the number printed against test photos, by how many of 30 photos are stored."""
    found = {}
    for stored in (3, 5, 10, 20, 30):
        rows = []
        for draw in range(4):
            train, test = drawn("objects", draw, 40, 30)
            with place() as folder:
                options = [LearnOptions(features_per_class=stored)]
                rows += [output(draw, *each) for each in taught(folder, [train], test, options)]
        found[stored] = rows
        print(stored, [(round(row["printed"], 3), round(row["test"], 3)) for row in rows], flush=True)
    return {str(stored): rows for stored, rows in found.items()}


def classifiers() -> list[dict[str, Any]]:
    made: dict[str, Callable[[], Classifier]] = {
        "nearest mean": NearestMean,
        "ridge": Ridge,
        "LDA": lambda: LDA(0.2),
        "random projection": RandomProjection,
        "softmax": lambda: Softmax(C=10.0),
        "SVM": LinearSVM,
        "auto": Auto,
    }
    rows = []
    for dataset, sizes in (
        ("objects", (5, 10, 30)),
        ("photos", (5, 10, 30, 80)),
        ("tiny-imagenet-50", (5, 10, 30, 100)),
    ):
        for per_class in sizes:
            row: dict[str, Any] = {"dataset": dataset, "per_class": per_class}
            for draw in range(2 if dataset == "tiny-imagenet-50" else 4):
                classes = {"objects": 40, "photos": 12}.get(dataset, 50)
                train, test = drawn(dataset, draw, classes, per_class)
                (features, names), (tested, truth) = features_of(train), features_of(test)
                labels = torch.tensor([list(train).index(name) for name in names])
                expected = torch.tensor([list(train).index(name) for name in truth])
                for name, make in made.items():
                    begin = time.perf_counter()
                    found = make().fit(features, labels)
                    seconds = time.perf_counter() - begin
                    right = float((found.scores(tested).argmax(1) == expected).double().mean())
                    row.setdefault(name, []).append(right)
                    row.setdefault(f"{name}, seconds", []).append(round(seconds, 3))
            rows.append(row)
            print(dataset, per_class, {name: round(statistics.fmean(row[name]), 3) for name in made}, flush=True)
    return rows


CODECS: dict[str, dict[str, Any]] = {
    "float32": {"codec": "float32"},
    "int8": {"codec": "int8"},
    "pq, 80 bytes": {"codec": "pq", "codec_bytes": 80},
}


def bytes_() -> list[dict[str, Any]]:
    """40 classes of `objects` in 8 updates, 30 photos each, of which some are stored in one of several forms.

    Storing photos instead gives the accuracy of float32 features exactly: the network is frozen, so their features can
    be computed again. Only the bytes differ: those of the JPEG files.
    """
    rows = []
    for stored in (1, 2, 5, 10, 30):
        for codec, settings in CODECS.items():
            found: list[tuple[float, int, int]] = []
            for draw in range(2):
                train, test = drawn("objects", draw, 40, 30)
                with place() as folder:
                    options = LearnOptions(features_per_class=stored, settings=settings)
                    for number, update in enumerate(updates_of(train, 5)):
                        learned = learn(ModelFolder(folder / "model"), laid_out(folder / str(number), update), options)
                    accuracy = evaluate(load(ModelFolder(folder / "model")), laid_out(folder / "test", test)).accuracy
                files = [path.stat().st_size for paths in train.values() for path in paths]
                found.append((accuracy, learned.memory_bytes, round(40 * stored * statistics.fmean(files))))
            accuracy, stored_bytes, file_bytes = (statistics.fmean(each) for each in zip(*found, strict=True))
            row = {"codec": codec, "features_per_class": stored, "accuracy": accuracy, "bytes": stored_bytes}
            rows += [row, {**row, "codec": "JPEG files", "bytes": file_bytes}] if codec == "float32" else [row]
            print(json.dumps(row), flush=True)
    return rows


def unknown() -> dict[str, Any]:
    """Some classes are taught, others are not: which score tells them apart, and is the stated rate kept?"""
    rows = [
        _unknown(draw, taught_, per_class) for taught_ in (5, 10, 20, 30) for per_class in (5, 30) for draw in range(20)
    ]
    summary = []
    for row in rows[::20]:
        same = [each for each in rows if all(each[key] == row[key] for key in ("taught", "per_class"))]
        numbers = [key for key, value in row.items() if isinstance(value, float)]
        means = {key: round(statistics.fmean(each[key] for each in same), 4) for key in numbers}
        spread = round(statistics.stdev(each["unknown accepted"] for each in same), 4)
        summary.append({"taught": row["taught"], "per_class": row["per_class"], **means, "unknown sd": spread})
        print(json.dumps(summary[-1]), flush=True)
    return {"summary": summary, "draws": rows}


def _unknown(draw: int, classes: int, per_class: int) -> dict[str, Any]:
    """Test photos of `classes` taught classes against those of all others, up to 20, on features of the network."""
    train, test = drawn("objects", draw, 40, per_class)
    names = list(train)
    known, other = names[:classes], names[max(20, classes) :]
    features, labels = features_of({name: train[name] for name in known})
    members = torch.tensor([known.index(name) for name in labels])
    classifier, similarity = Auto().fit(features, members), ClassSimilarity.fitted(features, members)
    temperature = fit_temperature(classifier.held_out_scores(features, members), members)
    scores: dict[str, Callable[[Tensor], Tensor]] = {
        "probability": lambda rows: torch.softmax(classifier.scores(rows) / temperature, 1).max(1).values,
        "raw score": lambda rows: classifier.scores(rows).max(1).values,
        "energy": lambda rows: torch.logsumexp(classifier.scores(rows) / temperature, 1),
        "nearest feature": lambda rows: (rows @ features.T).max(1).values,
        "nearest mean": similarity,
    }
    tested = [features_of({name: test[name] for name in some})[0] for some in (known, other)]
    row: dict[str, Any] = {"draw": draw, "taught": classes, "per_class": per_class}
    for name, score_of in scores.items():
        own, foreign = (score_of(rows).double() for rows in tested)
        row[f"auroc, {name}"] = float((own[:, None] > foreign).double().mean())
        row[f"known accepted at 5 % unknown, {name}"] = float((own > foreign.quantile(0.95)).double().mean())
    for threshold in (0.5, 0.9):
        for kind, rows in zip(("known", "unknown"), tested, strict=True):
            row[f"{kind} at {threshold}"] = float((scores["probability"](rows) >= threshold).double().mean())
    stated = similarity.threshold()
    row["known stated"] = stated.known_accepted
    for kind, rows in zip(("known", "unknown"), tested, strict=True):
        row[f"{kind} accepted"] = float((similarity(rows) >= stated.similarity).double().mean())
    return row


def speed() -> dict[str, Any]:
    """Best of three of each, side by side; decoding is part of both."""
    train, _ = drawn("objects", 0, 40, 30)
    *before, last = updates_of(train, 5)
    paths = [path for each in last.values() for path in each]
    with place() as folder:
        model = ModelFolder(folder / "model")
        for number, update in enumerate(before):
            learn(model, laid_out(folder / f"update-{number}", update))
        source = laid_out(folder / "last", last)
        blank = Samples.of(torch.zeros(16, SIZE, SIZE, 3, dtype=torch.uint8), torch.zeros(16).long())
        network = make_network(NETWORK, "cosine", blank, seed=0).frozen()
        plain = load_efficientnet(NETWORK).eval()
        mean, std = network.mean, network.std
        found: dict[str, list[float]] = {"update": [], "forward": [], "eager": []}
        for trial in range(3):
            copy = folder / f"copy-{trial}"
            shutil.copytree(folder / "model", copy)
            begin = time.perf_counter()
            learn(ModelFolder(copy), source)
            found["update"].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            images = torch.stack([decode(path, size=SIZE) for path in paths])
            with torch.inference_mode():
                for some in images.split(8):
                    network.features(some)
            found["forward"].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            images = torch.stack([decode(path, size=SIZE) for path in paths])
            with torch.inference_mode():
                for some in images.split(32):
                    plain(((some.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous())
            found["eager"].append(time.perf_counter() - begin)
    best = {name: min(values) for name, values in found.items()}
    result = {
        "photos": len(paths),
        **{f"{name}_seconds": round(value, 3) for name, value in best.items()},
        "update_over_forward": round(best["update"] / best["forward"], 2),
        "eager_over_forward": round(best["eager"] / best["forward"], 2),
    }
    print(json.dumps(result))
    return result


SECTIONS: dict[str, Callable[[], Any]] = {
    **{"accuracy": accuracy, "finetune": finetune, "trust": trust, "scratch": scratch, "tuned": tuned},
    **{"herding": herding, "classifiers": classifiers, "bytes": bytes_, "unknown": unknown, "speed": speed},
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("section", nargs="+", choices=SECTIONS)
    for section in arguments.parse_args().section:
        found = SECTIONS[section]()
        (RESULTS / f"own_photos-{section}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
