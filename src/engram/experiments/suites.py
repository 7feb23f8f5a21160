"""The paper's tables and figures by name, and our own, as declarations of the runs that they take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

PAPER_SAMPLES = 500  # training images of a class of CIFAR-100, for which the paper's numbers per class are


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of a table or one point of a figure: a method with settings, run once per seed."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    series: str  # its line in the figure
    value: float | None = None  # its place on the axis of what is varied
    classes_per_task: int | None = None  # None: the data set's usual number
    first_task: int | None = None  # classes of the first task, if another number
    budget: int | None = None  # bytes per class; a variant that it is too small for is left out


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a suite needs to know about a data set and a preset to choose its values."""

    classes: int
    per_class: int  # training samples of the smallest class
    sample_bytes: int  # of an image
    classes_per_task: int
    features_per_class: int  # L and P of the preset
    images_per_class: int
    full: bool  # everything that the paper varies, or what short runs can show
    rotates: bool = False  # whether engram trains with rotation labels

    def scaled(self, *counts: int) -> list[int]:
        """The paper's numbers per class of CIFAR-100, in proportion for smaller classes."""
        share = min(1.0, self.per_class / PAPER_SAMPLES)
        return sorted({max(1, round(count * share)) for count in counts})

    def task_sizes(self) -> list[int]:
        """M, classes per task: the usual number, and in a full suite half and twice of it."""
        usual = self.classes_per_task
        sizes = {usual // 2, usual, 2 * usual} if self.full else {usual}
        return sorted(size for size in sizes if 1 <= size <= self.classes // 2)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Which runs, on which split, what is varied, and what the paper found."""

    summary: str
    variants: Callable[[DataFacts], Iterable[Variant]]
    finding: str | None = None  # the paper's; our own suites have none
    varies: str | None = None  # the name of the axis of `Variant.value`
    validation: float = 0.0  # the share of the training samples that is held out and tested on


def _variant(method: str, label: str = "", settings: Mapping[str, Any] | None = None, **others: Any) -> Variant:
    label = label or method
    return Variant(**{"label": label, "method": method, "settings": settings or {}, "series": label, **others})


def _table1(facts: DataFacts) -> Iterable[Variant]:
    images = {"images_per_class": facts.images_per_class}
    total = {"images_total": facts.images_per_class * facts.classes}
    features = {"features_per_class": facts.features_per_class}
    hybrid = {**features, "images_per_class": max(1, facts.images_per_class // 2)}
    rows: dict[str, dict[str, int]] = {
        **{"lwf": {}, "icarl": total, "eeil": total, "lucir": images, "bic-uncorrected": total, "bic": total},
        **{"gamma-lwf": {}, "gamma-icarl": images, "features": features, "hybrid": hybrid},
    }
    return [_variant(method, settings=settings) for method, settings in rows.items()]


def _memory(facts: DataFacts) -> Iterable[Variant]:
    beside = facts.scaled(100)[0]  # the hybrid's features
    for size in facts.task_sizes():
        rows = [
            ("features", f"L = {count}", {"features_per_class": count}) for count in facts.scaled(50, 100, 250, 500)
        ]
        for count in facts.scaled(5, 10, 20, 50):
            images = {"images_per_class": count}
            rows.append(("gamma-icarl", f"P = {count}", images))
            rows.append(("hybrid", f"L = {beside}, P = {count}", {**images, "features_per_class": beside}))
        for method, what, settings in rows:
            series = f"{method}, M = {size}"
            yield _variant(method, f"{method}, {what}, M = {size}", settings, series=series, classes_per_task=size)


def _points(facts: DataFacts) -> Iterable[Variant]:
    for size in facts.task_sizes():
        for count in facts.scaled(10, 20, 50, 100, 250):
            for method, setting in (("features", "features_per_class"), ("gamma-icarl", "images_per_class")):
                label, place = f"{method}, {count} a class, M = {size}", {"value": count, "classes_per_task": size}
                yield _variant(method, label, {setting: count}, series=f"{method}, M = {size}", **place)


def _vary(
    setting: str, symbol: str, values: Sequence[float], methods: Sequence[str] = ("features",), **others: object
) -> Callable[[DataFacts], Iterable[Variant]]:
    """One setting varied, for one or more methods; L is the paper's 500 per class, in proportion."""

    def variants(facts: DataFacts) -> Iterable[Variant]:
        for method in methods:
            stored = {"features_per_class": facts.scaled(500)[0]} if method == "features" else {}
            for value in values:
                label = f"{method}, {symbol} = {value:g}" if len(methods) > 1 else f"{symbol} = {value:g}"
                yield _variant(method, label, {setting: value, **stored, **others}, series=method, value=value)

    return variants


def _quality(facts: DataFacts) -> Iterable[Variant]:
    features, images = facts.scaled(500)[0], facts.scaled(50)[0]
    yield _variant("features", "P = 0", {"features_per_class": features})
    yield _variant("hybrid", f"P = {images}", {"features_per_class": features, "images_per_class": images})


def _balance(facts: DataFacts) -> Iterable[Variant]:
    for label, balanced in (("balanced", True), ("unbalanced", False)):
        settings = {"balanced": balanced, "features_per_class": facts.scaled(250)[0]}
        yield _variant("features", label, settings, series="features")


BUDGETS = (1 / 3, 1, 10 / 3, 10, 20, 65)  # per class, in images: for 100 classes of CIFAR-100, 0.1 to 19 MB
FRONTIER: tuple[tuple[str, Mapping[str, str]], ...] = (
    *((method, {}) for method in ("icarl", "eeil", "lucir", "bic", "gamma-icarl", "hybrid", "features", "engram")),
    *(("engram", {"codec": codec}) for codec in ("float32", "int8", "pq")),
)


def _frontier(facts: DataFacts) -> Iterable[Variant]:
    for method, settings in FRONTIER:
        series = ", ".join((method, *settings.values()))
        for images in BUDGETS:
            budget = round(images * facts.sample_bytes)
            yield _variant(method, f"{series}, {budget:,} bytes a class", settings, series=series, budget=budget)


PARTS: Mapping[str, Mapping[str, Any]] = {
    "engram": {},
    "without rotation labels": {"rotation_labels": 0.0},
    "rotation labels in every task": {"rotation_tasks": "every"},
    "LUCIR's training": {"objective": "lucir"},
    "late weight averaging": {"weight_averaging": 0.6, "weight_averaging_from": 0.8},  # from the sixth task on
    "the paper's adapter": {"adapter": "mlp", "adapter_steps": 720, "alpha": 100.0},
    "always a linear adapter": {"adapter": "ridge"},
    "softmax regression": {"classifier": "softmax", "C": 100.0},
    "LDA": {"classifier": "lda"},
    "float32": {"codec": "float32"},
    "product quantisation, 1/16": {"codec": "pq"},
}


def _parts(facts: DataFacts) -> Iterable[Variant]:
    stored = {"features_per_class": facts.features_per_class}
    for label, settings in PARTS.items():
        if facts.rotates or not settings.keys() & {"rotation_labels", "rotation_tasks"}:
            yield _variant("engram", label, {**stored, **settings})
    yield _variant("features", "features, the paper's", stored, series="features")


# Methods that store no image. Most share their trainings.
EXEMPLAR_FREE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{method: (method, {}) for method in ("engram", "features", "features-unadapted")},
    **{f"features, {name}": ("features", {"objective": name}) for name in ("efc", "adagauss", "lucir")},
    "features, rotation labels": ("features", {"rotation_labels": 1.0}),
    "features, rotation labels in the first task": ("features", {"rotation_labels": 1.0, "rotation_tasks": "first"}),
    **{method: (method, {}) for method in ("dpcr", "gaussian-replay", "adc", "ldc", "sdc")},
    "nearest mean, no compensation": ("sdc", {"compensation": "identity"}),
    "fecam, frozen": ("fecam", {}),
    "fecam, ridge compensation": ("fecam", {"tune": "every", "compensation": "ridge"}),
    **{method: (method, {}) for method in ("fetril", "gamma-lwf", "lwf", "lwm", "mas", "ewc", "finetune")},
    "lwf, softmax, λ = 10, T = 2": ("lwf", {"loss_function": "softmax", "distillation": 10.0, "temperature": 2.0}),
}


def _exemplar_free(facts: DataFacts, *, warm: bool = False) -> Iterable[Variant]:
    first = {"first_task": facts.classes // 2} if warm else {}
    for label, (method, settings) in EXEMPLAR_FREE.items():
        stores = method in ("engram", "features", "features-unadapted")
        stored = {"features_per_class": facts.features_per_class} if stores else {}
        yield _variant(method, label, {**stored, **settings}, **first)


EXEMPLARS = ("icarl", "eeil", "lucir", "bic", "bic-uncorrected", "il2m", "threshold-moving", "gem", "a-gem")


def _exemplars(facts: DataFacts) -> Iterable[Variant]:
    for method in EXEMPLARS:
        yield _variant(method, settings={"images_per_class": facts.images_per_class})


SUITES: Mapping[str, Suite] = {
    "table1": Suite(
        summary="Table 1: the ten systems, accuracy and memory",
        finding="Features reach the accuracy of image replay at about an eighth of the memory; the hybrid is best.",
        variants=_table1,
    ),
    "memory": Suite(
        summary="accuracy against memory in MB: features, images, or both",
        finding="At equal memory features are ahead of images where images are large, and the hybrid is ahead of "
        "images.",
        variants=_memory,
    ),
    "points": Suite(
        summary="accuracy against stored data points, L features or P images",
        finding="Features are ahead of images mostly even at equal numbers, whatever each costs.",
        variants=_points,
        varies="data points stored per class",
    ),
    "cosine": Suite(
        summary="cosine head or plain, on lwf (validation)",
        finding="The cosine head is better: 48.7 against 45.2 on CIFAR-100's validation split.",
        variants=lambda facts: [
            _variant("lwf", f"{head} head", {"head": head}, series="lwf") for head in ("cosine", "linear")
        ],
        validation=0.1,
    ),
    "alpha": Suite(  # from a random start: the least-squares start is the limit of large α
        summary="α, the weight of similarity in the adapter's loss (validation)",
        finding="A large α is wanted; accuracy and ω rise with it.",
        variants=_vary("alpha", "α", (0.1, 1.0, 10.0, 100.0, 1000.0), adapter_init="random"),
        varies="α",
        validation=0.1,
    ),
    "width": Suite(
        summary="d', the width of the adapter's hidden layers (validation)",
        finding="Accuracy and ω rise with the width and are best at 1024 = 16 d.",
        variants=_vary("adapter_width", "d'", (32, 64, 128, 256, 512, 1024, 2048)),
        varies="width d'",
        validation=0.1,
    ),
    "depth": Suite(
        summary="the number of the adapter's hidden layers (validation)",
        finding="Two hidden layers are best.",
        variants=_vary("adapter_depth", "hidden layers", (1, 2, 3, 4)),
        varies="hidden layers",
        validation=0.1,
    ),
    "gamma": Suite(
        summary="γ, the weight of feature distillation, for features and gamma-lwf (validation)",
        finding="A higher γ gives a higher ω; a large one lowers accuracy.",
        variants=_vary("feature_distillation", "γ", (0.0, 0.01, 0.05, 0.1, 1.0), ("features", "gamma-lwf")),
        varies="γ",
        validation=0.1,
    ),
    "quality": Suite(
        summary="ω along the tasks, without images and with",
        finding="ω of the previous task stays above .9 and rises along the tasks; that of the first falls to about .8 "
        "after ten tasks; both are higher with images.",
        variants=_quality,
    ),
    "balance": Suite(
        summary="the classifier on L features of every class, or on all new ones",
        finding="Balanced is better: .913 against .893 on ImageNet-100.",
        variants=_balance,
    ),
    "frontier": Suite(
        summary="accuracy against bytes: every method with a memory, and every codec (ours)",
        finding="At equal memory float32 features are ahead of images where images are large.",
        variants=_frontier,
    ),
    "exemplar-free": Suite(
        summary="every method that stores no image, with its bytes (ours)",
        variants=_exemplar_free,
    ),
    "exemplar-free-warm": Suite(
        summary="every method that stores no image, after half of the classes at once (ours)",
        variants=partial(_exemplar_free, warm=True),
    ),
    "exemplars": Suite(
        summary="every method that stores images, with as many of each class (ours)",
        variants=_exemplars,
    ),
    "parts": Suite(
        summary="what each part of our method is worth (ours, validation)",
        variants=_parts,
        validation=0.1,
    ),
}
