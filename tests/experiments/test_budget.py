"""A budget in bytes chooses how much is stored: as much as fits, and no more."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from conftest import blobs, patterns

from engram.data import Dataset, Samples, load
from engram.errors import UsageError
from engram.experiments import Plan
from engram.methods import BudgetError, Learner, parse_bytes, setting_names

VECTORS, IMAGES = blobs(), patterns()  # six classes of vectors of 12 numbers; four of images of 8 x 8 x 3
VECTOR, IMAGE, FEATURE = 12 * 4, 8 * 8 * 3, 64 * 4  # bytes
QUICK = {"epochs": 1, "batch_size": 32, "learning_rate": 0.1, "adapter_steps": 5, "adapter_width": 32}


def planned(method: str, budget: int, **settings: Any) -> Plan:
    return Plan(method=method, budget=budget, settings=settings)


def learned(plan: Plan, dataset: Dataset) -> Learner:
    """The learner of a plan after all of its tasks, quickly."""
    quick = {name: value for name, value in QUICK.items() if name in setting_names(plan.method)}
    learner = Plan(method=plan.method, budget=plan.budget, settings={**quick, **plan.settings}).learner(dataset)
    for task in plan.stream(dataset):
        learner.learn(task)
    return learner


def least_named(plan: Plan, dataset: Dataset) -> int:
    """The least number of bytes, which the error names."""
    with pytest.raises(BudgetError) as caught:
        plan.chosen(dataset)
    found = re.search(r"would be ([\d,]+)\.$", str(caught.value))
    assert found is not None
    return int(found[1].replace(",", ""))


# Parsing


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("6MB", 6 * 2**20),
        ("6mb", 6 * 2**20),
        ("6 M", 6 * 2**20),
        ("3MiB", 3 * 2**20),
        ("500 KB", 500 * 2**10),
        ("500kib", 500 * 2**10),
        ("1.5GB", 3 * 2**29),
        ("0.5 KB", 512),
        ("64", 64),
        ("64B", 64),
        (" 64 b ", 64),
    ],
)
def test_bytes_are_written_with_units_of_powers_of_1024(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MB", "-3MB", "0MB", "0", "0.5", "lots", "3TB", "3MBs", "1,000", "1e6", "3 4MB"])
def test_text_that_is_not_a_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"'{text}'")):
        parse_bytes(text)


# Choices


def test_without_a_budget_nothing_is_chosen() -> None:
    assert Plan(method="hybrid").chosen(VECTORS) == {}


@pytest.mark.parametrize(
    ("method", "dataset", "chosen"),
    [
        ("features", VECTORS, {"features_per_class": 6}),  # 10,000 / 6 / 256
        ("features", IMAGES, {"features_per_class": 9}),  # 10,000 / 4 / 256
        ("features-unadapted", VECTORS, {"features_per_class": 6}),
        ("gamma-icarl", VECTORS, {"images_per_class": 34}),  # 10,000 / 6 / 48
        ("gamma-icarl", IMAGES, {"images_per_class": 13}),  # 10,000 / 4 / 192
        ("lucir", IMAGES, {"images_per_class": 13}),
        ("icarl", VECTORS, {"images_total": 208}),  # 10,000 / 48
        ("icarl", IMAGES, {"images_total": 52}),  # 10,000 / 192
        ("eeil", IMAGES, {"images_total": 52}),
        ("bic", IMAGES, {"images_total": 52}),
        ("bic-uncorrected", IMAGES, {"images_total": 52}),
        # Half of the bytes for images, 5,000 / 4 / 192; the features have what these leave, (10,000 - 4,608) / 4 / 256.
        ("hybrid", IMAGES, {"images_per_class": 6, "features_per_class": 5}),
        ("hybrid", VECTORS, {"images_per_class": 17, "features_per_class": 3}),
    ],
)
def test_a_budget_chooses_what_the_method_stores(method: str, dataset: Dataset, chosen: dict[str, int]) -> None:
    plan = planned(method, 10_000)
    assert plan.chosen(dataset) == chosen
    learner = plan.learner(dataset)
    assert {name: learner.settings()[name] for name in chosen} == chosen


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({"codec": "float16"}, 13),  # 10,000 / 6 / 128
        ({"codec": "int8"}, 24),  # (10,000 - 512) / 6 / 64
        ({"codec": "pq"}, 11),  # 6 x 11 vectors are all centroids: 66 x (16 + 128) are 9,504
        ({"codec": "pq", "codec_bytes": 32}, 10),  # 60 x (32 + 128) are 9,600
    ],
)
@pytest.mark.parametrize("method", ["features", "features-unadapted"])
def test_a_budget_counts_what_the_codec_takes(method: str, settings: dict[str, Any], chosen: int) -> None:
    assert planned(method, 10_000, **settings).chosen(VECTORS) == {"features_per_class": chosen}


def test_a_codebook_is_counted_once() -> None:
    codebook = (256 + 64) * 64 * 2  # and a rotation
    plan = planned("features", codebook + 6 * 50 * 16, codec="pq")
    assert plan.chosen(VECTORS) == {"features_per_class": 50}
    assert planned("features", codebook + 6 * 50 * 16 - 1, codec="pq").chosen(VECTORS) == {"features_per_class": 49}


def test_coded_features_have_what_images_leave() -> None:
    chosen = planned("hybrid", 5_000, codec="int8").chosen(IMAGES)
    assert chosen == {"images_per_class": 3, "features_per_class": (5_000 - 4 * 3 * IMAGE - 512) // 4 // 64}
    assert learned(planned("hybrid", 5_000, codec="int8"), IMAGES).memory.nbytes <= 5_000


def test_bytes_that_small_classes_leave_free_go_to_the_other_kind() -> None:
    most = int(torch.bincount(VECTORS.train.labels).max())
    room = 6 * most * VECTOR  # all samples
    chosen = {"images_per_class": most, "features_per_class": 3 * room // 6 // FEATURE}
    assert planned("hybrid", 4 * room).chosen(VECTORS) == chosen
    most = int(torch.bincount(IMAGES.train.labels).max())
    room = 4 * most * 64 + 512  # a byte a number: all features are smaller than all images
    chosen = planned("hybrid", 3 * room, codec="int8").chosen(IMAGES)
    assert chosen == {"images_per_class": 2 * room // 4 // IMAGE, "features_per_class": most}
    assert planned("hybrid", 50_000, features_per_class="10.0").chosen(VECTORS)  # as any setting may be written


def test_the_bytes_that_images_leave_of_their_half_go_to_the_features() -> None:
    budget = 5472  # half is 2,736: three images of each of four classes take 2,304 of it
    assert planned("hybrid", budget).chosen(IMAGES) == {"images_per_class": 3, "features_per_class": 3}
    assert (budget - 4 * 3 * IMAGE) // 4 // FEATURE == 3
    assert budget // 2 // 4 // FEATURE == 2  # the other half alone would hold


@pytest.mark.parametrize("dataset", [VECTORS, IMAGES], ids=["vectors", "images"])
@pytest.mark.parametrize("method", ["features", "gamma-icarl", "icarl", "hybrid"])
def test_the_final_memory_fits_the_budget_and_one_more_of_each_class_would_not(method: str, dataset: Dataset) -> None:
    classes, image = len(dataset.class_names), VECTOR if dataset is VECTORS else IMAGE
    per_class = {"features": 6 * FEATURE, "hybrid": 5 * image + 3 * FEATURE}.get(method, 6 * image)
    budget = classes * (per_class + 40)  # 40: too little for one more of anything
    memory = learned(planned(method, budget), dataset).memory
    assert memory.nbytes == len(memory.images) * image + len(memory.features) * FEATURE
    assert (len(memory.images) > 0, len(memory.features) > 0) == (
        method != "features",
        method in ("features", "hybrid"),
    )
    one_more = FEATURE if len(memory.features) else image  # of both, the features have what the images leave
    assert memory.nbytes <= budget < memory.nbytes + classes * one_more


def test_the_classes_counted_are_those_of_the_tasks_that_are_learned() -> None:
    whole = Plan(method="features", budget=9000, classes_per_task=2)
    part = Plan(method="features", budget=9000, classes_per_task=2, tasks=1)
    assert whole.chosen(VECTORS) == {"features_per_class": 9000 // 6 // FEATURE}
    assert part.chosen(VECTORS) == {"features_per_class": 9000 // 2 // FEATURE}
    larger = Plan(method="features", budget=9000, classes_per_task=1, first_task=3, tasks=2)
    assert larger.chosen(VECTORS) == {"features_per_class": 9000 // 4 // FEATURE}


def test_the_length_of_a_feature_is_the_networks() -> None:
    own = torch.nn.Sequential(torch.nn.Linear(12, 10), torch.nn.ReLU())
    assert planned("features", 6000, network=own).chosen(VECTORS) == {"features_per_class": 6000 // 6 // 40}
    assert planned("features", 60_000, network="resnet18-small").chosen(IMAGES) == {
        "features_per_class": 60_000 // 4 // 2048
    }


def test_three_megabytes_of_fifty_cifar_classes_are_twenty_images_or_245_features_of_each() -> None:
    labels = torch.arange(50).repeat_interleave(250)
    samples = Samples.of(torch.zeros(1, 32, 32, 3, dtype=torch.uint8).expand(12_500, -1, -1, -1), labels)
    cifar = Dataset("cifar100", samples, samples, tuple(map(str, range(50))))
    budget = parse_bytes("3MB")
    for method, chosen in (
        ("gamma-icarl", {"images_per_class": 20}),
        ("icarl", {"images_total": 1024}),
        ("features", {"features_per_class": 245}),
        ("hybrid", {"images_per_class": 10, "features_per_class": 125}),
    ):
        assert planned(method, budget, network="resnet32").chosen(cifar) == chosen


# Settings given by the user


def test_settings_that_are_given_stay_and_the_others_are_chosen() -> None:
    images = planned("hybrid", 10_000, features_per_class=4)
    assert images.chosen(IMAGES) == {"images_per_class": (10_000 - 4 * 4 * FEATURE) // 4 // IMAGE}
    features = planned("hybrid", 10_000, images_per_class="4")  # as a command line gives it
    assert features.chosen(IMAGES) == {"features_per_class": (10_000 - 4 * 4 * IMAGE) // 4 // FEATURE}
    total = planned("hybrid", 10_000, images_total=18)
    assert total.chosen(IMAGES) == {"features_per_class": (10_000 - 18 * IMAGE) // 4 // FEATURE}
    settings = total.learner(IMAGES).settings()
    assert (settings["images_total"], settings["images_per_class"], settings["features_per_class"]) == (18, None, 6)
    memory = learned(total, IMAGES).memory
    assert (len(memory.images), len(memory.features)) == (16, 24)  # 18 are four of each of four classes


def test_a_budget_goes_before_the_number_of_a_preset() -> None:
    digits = load("digits")
    assert Plan(method="features").learner(digits).settings()["features_per_class"] == 100
    plan = Plan(method="features", budget=10 * 7 * FEATURE)
    assert plan.chosen(digits) == {"features_per_class": 7}
    assert plan.learner(digits).settings()["features_per_class"] == 7


def test_a_budget_goes_before_the_number_of_a_method() -> None:
    assert Plan(method="gamma-icarl").learner(IMAGES).settings()["images_per_class"] == 20
    assert planned("gamma-icarl", 4 * 3 * IMAGE).learner(IMAGES).settings()["images_per_class"] == 3
    assert planned("icarl", 10 * IMAGE).learner(IMAGES).settings()["images_total"] == 10


# Refusals


@pytest.mark.parametrize("method", ["gamma-lwf", "lwf", "finetune", "joint"])
def test_methods_that_store_nothing_or_everything_are_refused_a_budget(method: str) -> None:
    with pytest.raises(UsageError, match=f"'{method}'"):
        planned(method, 10_000).learner(VECTORS)


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("features", {"features_per_class": 5}),
        ("gamma-icarl", {"images_per_class": 5}),
        ("icarl", {"images_total": 50}),
        ("icarl", {"images_per_class": 5}),
        ("hybrid", {"images_per_class": 5, "features_per_class": 5}),
        ("hybrid", {"images_total": 50, "features_per_class": 5}),
    ],
)
def test_a_budget_that_has_nothing_left_to_choose_is_refused(method: str, given: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=" and ".join(given)):
        planned(method, 10_000, **given).chosen(VECTORS)


@pytest.mark.parametrize(
    ("method", "given", "least"),
    [
        ("features", {}, 4 * FEATURE),
        ("gamma-icarl", {}, 4 * IMAGE),
        ("icarl", {}, 4 * IMAGE),
        ("hybrid", {}, 4 * (IMAGE + FEATURE)),
        ("hybrid", {"features_per_class": 7}, 4 * (IMAGE + 7 * FEATURE)),
        ("hybrid", {"images_per_class": 7}, 4 * (7 * IMAGE + FEATURE)),
        ("hybrid", {"images_total": 11}, 11 * IMAGE + 4 * FEATURE),
    ],
)
def test_a_budget_too_small_for_one_of_each_class_is_refused_and_the_least_that_would_do_is_named(
    method: str, given: dict[str, int], least: int
) -> None:
    assert least_named(planned(method, 1, **given), IMAGES) == least
    assert least_named(planned(method, least - 1, **given), IMAGES) == least
    chosen = planned(method, least, **given).chosen(IMAGES)
    assert chosen == {name: 4 if name == "images_total" else 1 for name in chosen}
    assert learned(planned(method, least, **given), IMAGES).memory.nbytes <= least


@pytest.mark.parametrize("side", [2, 8, 16], ids=["smaller", "alike", "larger"])
def test_the_least_that_is_named_will_do_however_images_and_features_compare(side: int) -> None:
    dataset = patterns(side=side)  # images of 12, 192 and 768 bytes, features of 256
    least = least_named(planned("hybrid", 1), dataset)
    assert planned("hybrid", least).chosen(dataset) == {"images_per_class": 1, "features_per_class": 1}
    between = planned("hybrid", least + least // 2).chosen(dataset)
    assert between["images_per_class"] >= 1 <= between["features_per_class"]
    stored = 4 * (between["images_per_class"] * side**2 * 3 + between["features_per_class"] * FEATURE)
    assert stored <= least + least // 2


def test_the_word_none_means_that_a_setting_is_not_given() -> None:
    by_word = planned("gamma-icarl", 10_000, images_per_class="none")
    assert by_word.chosen(IMAGES) == planned("gamma-icarl", 10_000, images_per_class=None).chosen(IMAGES)


# The codec auto


def many(classes: int, per_class: int, dimension: int = 8) -> Dataset:
    labels = torch.arange(classes).repeat_interleave(per_class)
    samples = Samples.of(torch.rand(len(labels), dimension), labels)
    return Dataset("many", samples, samples, tuple(map(str, range(classes))))


def test_a_budget_chooses_an_automatic_codec_with_the_number() -> None:
    pytest.importorskip("faiss")
    dataset = many(100, 200)  # vectors of 64 numbers; a codebook of 256 x 64 x 2 bytes, and a rotation of 64 x 64 x 2
    chosen = {mb: planned("engram", int(mb * 2**20)).chosen(dataset) for mb in (0.02, 0.1, 0.4, 1, 2)}
    assert {mb: tuple(each.values()) for mb, each in chosen.items()} == {
        0.02: (3, "int8", None),  # a codebook would not fit
        0.1: (79, "pq", 8),  # int8 would hold 16
        0.4: (236, "pq", 16),  # ... 65
        1: (314, "pq", 32),  # ... 163
        2: (327, "int8", None),
    }
    for mb, each in chosen.items():
        learner = planned("engram", int(mb * 2**20)).learner(dataset)
        assert {name: learner.settings()[name] for name in each} == each


def test_for_a_given_number_the_most_precise_codec_that_fits_is_chosen() -> None:
    pytest.importorskip("faiss")
    dataset, codebook = many(10, 500), (256 + 64) * 64 * 2
    for budget, codec in (
        (10 * 200 * 64 + 512, ("int8", None)),
        (10 * 200 * 64 + 511, ("pq", 32)),
        (codebook + 64_000, ("pq", 32)),
        (codebook + 63_999, ("pq", 16)),
        (codebook + 31_999, ("pq", 8)),
    ):
        chosen = planned("engram", budget, features_per_class=200).chosen(dataset)
        assert (chosen["codec"], chosen["codec_bytes"]) == codec
    with pytest.raises(BudgetError):
        planned("engram", codebook + 15_999, features_per_class=200).chosen(dataset)


def test_a_codec_that_is_given_stays() -> None:
    assert planned("engram", 10_000, codec="int8").chosen(VECTORS) == {"features_per_class": 24}
    assert planned("features", 10_000).chosen(VECTORS).keys() == {"features_per_class"}  # its default is float32


def test_without_faiss_int8_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.features.codecs.find_spec", lambda name: None)
    assert planned("engram", 50_000).chosen(many(10, 500))["codec"] == "int8"
