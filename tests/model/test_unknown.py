"""Images of unknown classes: the similarity to the nearest class mean, and a threshold that keeps its stated rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from folders_made import paint
from images_made import encoded
from torch import Tensor
from torch.nn import functional as F

from engram.errors import UsageError
from engram.model import ModelFolder, Prediction, inspect, learn, load, predict
from engram.model.held_out import ClassSimilarity

COLOURS = ("red", "green", "blue", "yellow")


def clusters(seed: int, classes: int, per_class: int, spread: float = 0.25) -> tuple[Tensor, Tensor]:
    """Unit features of classes whose centres scatter around one direction, and their classes."""
    draws = torch.Generator().manual_seed(seed)
    centres = torch.ones(32) + torch.randn(classes, 32, generator=draws)
    members = torch.arange(classes).repeat_interleave(per_class)
    return F.normalize(centres[members] + spread * torch.randn(len(members), 32, generator=draws)), members


def nearest_mean(features: Tensor, members: Tensor, sample: Tensor) -> float:
    """The cosine of a sample to the nearest class mean, by the definition."""
    means = [F.normalize(features[members == each].mean(0), dim=0) for each in members.unique()]
    return max(float(mean @ sample) for mean in means)


def test_held_out_similarities_match_means_without_the_sample_and_without_its_class() -> None:
    features, members = clusters(0, 4, 3)
    found = ClassSimilarity.fitted(features, members)
    rows = range(len(features))
    known = [
        nearest_mean(*(part[torch.arange(len(features)) != row] for part in (features, members)), features[row])
        for row in rows
    ]
    assert found.known.tolist() == pytest.approx(known, abs=1e-5)
    other = [
        nearest_mean(features[members != members[row]], members[members != members[row]], features[row]) for row in rows
    ]
    logits = torch.logit(torch.tensor(other, dtype=torch.float64), 0.01)
    assert found.centre == pytest.approx(float(logits.mean()), abs=1e-4)
    assert found(features[:1] * 7).item() == pytest.approx(nearest_mean(features, members, features[0]), abs=1e-5)


def test_more_classes_that_are_never_taught_are_accepted_about_as_often_as_stated() -> None:
    unknown, known, stated = [], [], []
    for draw in range(40):
        features, members = clusters(draw, 60, 10)
        taught, again = (members < 20) & (torch.arange(600) % 2 == 0), (members < 20) & (torch.arange(600) % 2 == 1)
        similarity = ClassSimilarity.fitted(features[taught], members[taught])
        threshold = similarity.threshold(0.05)
        stated.append(threshold.known_accepted)
        unknown.append((similarity(features[members >= 20]) >= threshold.similarity).double().mean())
        known.append((similarity(features[again]) >= threshold.similarity).double().mean())
    assert 0.03 < float(torch.stack(unknown).mean()) < 0.07
    assert float(torch.stack(known).mean()) == pytest.approx(sum(stated) / len(stated), abs=0.03)


def test_a_higher_rate_accepts_more_of_everything() -> None:
    similarity = ClassSimilarity.fitted(*clusters(1, 10, 8, spread=0.6))
    thresholds = [similarity.threshold(rate) for rate in (0.01, 0.05, 0.2, 0.5)]
    assert [each.similarity for each in thresholds] == sorted((each.similarity for each in thresholds), reverse=True)
    assert [each.known_accepted for each in thresholds] == sorted(each.known_accepted for each in thresholds)


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    place = tmp_path_factory.mktemp("colours")
    folder = ModelFolder(place / "model")
    learned = learn(folder, paint(place / "photos", COLOURS, 6))
    assert learned.rejection is not None and learned.rejection.classes == len(COLOURS)
    assert learned.rejection.images == 6 * len(COLOURS)
    assert inspect(folder).rejection == learned.rejection
    return folder


def test_predict_rejects_images_below_the_similarity_threshold(colours: ModelFolder, tmp_path: Path) -> None:
    model = load(colours)
    noise = torch.randint(0, 256, (64, 64, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    (tmp_path / "noise.png").write_bytes(encoded(noise.numpy(), "PNG"))
    known = sorted((colours.path.parent / "photos").rglob("*.*"))
    for reject in ("auto", "30%"):
        *accepted, rejected = predict(model, [*known, tmp_path / "noise.png"], reject=reject)
        assert isinstance(rejected, Prediction) and rejected.rejected
        assert sum(isinstance(each, Prediction) and not each.rejected for each in accepted) >= len(known) * 0.8


def test_there_is_no_rate_for_few_classes_or_a_network_trained_on_them(
    small_model: ModelFolder, colours: ModelFolder, tmp_path: Path
) -> None:
    assert load(small_model).class_similarity is None and inspect(small_model).rejection is None
    with pytest.raises(UsageError, match="probability"):
        predict(load(small_model), [], reject="auto")
    two = ModelFolder(tmp_path / "model")
    assert learn(two, paint(tmp_path / "photos", COLOURS[:2], 3)).rejection is None
    for rate in ("0%", "0.0%"):
        with pytest.raises(UsageError, match="found 0"):
            predict(load(colours), [], reject=rate)
