"""What the adapter depends on: α, width, depth; and γ, which the network's training depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engram.experiments.suites.suite import Facts, Suite, Variant


def _vary(
    setting: str, symbol: str, values: Sequence[float], methods: Sequence[str] = ("features",), **others: object
) -> Callable[[Facts], Iterable[Variant]]:
    """One method, or several, with one setting varied; L is the paper's 500 a class, in proportion."""

    def variants(facts: Facts) -> Iterable[Variant]:
        for method in methods:
            kept = {"features_per_class": facts.scaled(500)[0]} if method == "features" else {}
            for value in values:
                settings = {setting: value, **kept, **others}
                label = f"{method}, {symbol} = {value:g}" if len(methods) > 1 else f"{symbol} = {value:g}"
                yield Variant(label=label, method=method, settings=settings, series=method, value=value)

    return variants


ALPHA = Suite(  # From a random start: least squares is similarity alone, α without end.
    summary="α, the weight of similarity in the adapter's loss (validation)",
    finding="A large α is wanted; accuracy and ω rise with it.",
    variants=_vary("alpha", "α", (0.1, 1.0, 10.0, 100.0, 1000.0), adapter_init="random"),
    varies="α",
    validation=0.1,
)
WIDTH = Suite(
    summary="d', the width of the adapter's hidden layers (validation)",
    finding="Accuracy and ω rise with the width and are best at 1024 = 16 d.",
    variants=_vary("adapter_width", "d'", (32, 64, 128, 256, 512, 1024, 2048)),
    varies="width d'",
    validation=0.1,
)
DEPTH = Suite(
    summary="the number of the adapter's hidden layers (validation)",
    finding="Two hidden layers are best.",
    variants=_vary("adapter_depth", "hidden layers", (1, 2, 3, 4)),
    varies="hidden layers",
    validation=0.1,
)
GAMMA = Suite(
    summary="γ, the weight of feature distillation, for features and gamma-lwf (validation)",
    finding="A higher γ gives a higher ω; a large one lowers accuracy.",
    variants=_vary("feature_distillation", "γ", (0.0, 0.01, 0.05, 0.1, 1.0), ("features", "gamma-lwf")),
    varies="γ",
    validation=0.1,
)
