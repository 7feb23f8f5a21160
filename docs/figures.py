"""Draws the figures of the documents into docs/figures/.

`python docs/figures.py` draws all of them, `python docs/figures.py bytes gap` only these. `photos`, `bytes` and
`gap` are drawn from the result files in benchmarks/results, `drift` trains a small network on digits, and `tutorial`
runs the code of the tutorial.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import notebook
import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from engram.experiments import Result
from engram.features import Pairs, RidgeAdapter, herd

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"

OURS, PAPER, IMAGES, INK = "#2f7d4f", "#c2701e", "#4f6d9e", "#3a4252"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa3b2",
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "engram",  # the same file each time
    "figure.constrained_layout.use": True,
}

# Accuracy against bytes on CIFAR-100: a name, its colour, its result files, and where the name stands.
Series = tuple[str, str, tuple[str, ...], tuple[float, float], str]
SERIES: tuple[Series, ...] = (
    (
        "engram, LUCIR variant",
        OURS,
        (
            *(f"cifar100-budgets/engram-{budget}" for budget in ("0.05MB", "0.15MB", "0.3MB")),
            *("cifar100-table1/engram", "cifar100-budgets/engram-10MB"),
        ),
        (0, 10),
        "center",
    ),
    (
        "features (the paper's)",
        PAPER,
        (
            *(f"cifar100-budgets/features-{budget}" for budget in ("0.15MB", "0.3MB", "1MB")),
            *("cifar100-table1/features", "cifar100-budgets/features-10MB"),
        ),
        (-130, -60),
        "center",
    ),
    ("γ-iCaRL", IMAGES, ("cifar100-table1/gamma-icarl", "cifar100-budgets/gamma-icarl-10MB"), (10, -4), "left"),
    ("iCaRL", IMAGES, ("cifar100-table1/icarl", "cifar100-budgets/icarl-10MB"), (10, -4), "left"),
    ("LUCIR", IMAGES, ("cifar100-table1/lucir",), (10, -10), "left"),
    ("EEIL", IMAGES, ("cifar100-table1/eeil",), (10, -4), "left"),
    ("joint: every image", IMAGES, ("cifar100-table1/joint",), (26, 10), "right"),
)


def accuracy_against_bytes() -> Figure:
    """Average accuracy over five tasks of CIFAR-100 against the bytes stored at the end."""
    figure, axes = plt.subplots(figsize=(8.4, 4.0))
    for name, colour, folders, offset, side in SERIES:
        results = [Result.load(RESULTS / folder / "result.json") for folder in folders]
        points = [(each.memory_bytes / 2**20, each.average_incremental_accuracy) for each in results]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=6, linewidth=2)
        axes.annotate(
            name, points[-1], offset, textcoords="offset points", ha=side, color=colour, fontweight="bold", fontsize=10
        )
    ticks = {0.05: "50 KB", 0.15: "150 KB", 0.75: "750 KB", 3: "3 MB", 10: "10 MB", 73: "73 MB"}
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set_xlim(0.035, 110)
    axes.set_ylim(0.42, 0.57)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel("stored for all 50 classes (logarithmic)")
    axes.set_ylabel("average accuracy, CIFAR-100")
    return figure


STORED = {"int8": ("features, int8 (engram's default)", OURS), "float32": ("features, float32", PAPER)}
STORED["JPEG files"] = ("the photos themselves (JPEG)", IMAGES)


def photos() -> Figure:
    """Accuracy on 40 classes of photos, learned in 8 updates, against the bytes stored of old classes."""
    rows = json.loads((RESULTS / "own_photos-bytes.json").read_text())
    figure, axes = plt.subplots(figsize=(8.4, 3.8))
    for codec, (name, colour) in STORED.items():
        own = [row for row in rows if row["codec"] == codec]
        sizes, accuracies = [row["bytes"] / 2**20 for row in own], [row["accuracy"] for row in own]
        axes.plot(sizes, accuracies, "o-", color=colour, markersize=6, linewidth=2, label=name)
    axes.legend(frameon=False, labelcolor="linecolor", loc="lower right", prop={"weight": "bold", "size": 10})
    for row in (row for row in rows if row["codec"] == "int8"):
        place = (row["bytes"] / 2**20, row["accuracy"])
        axes.annotate(f"{row['features_per_class']} a class", place, (-10, 8), textcoords="offset points", fontsize=9)
    ticks = {0.05: "50 KB", 0.2: "200 KB", 1: "1 MB", 5: "5 MB", 20: "20 MB"}
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.margins(x=0.08, y=0.18)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel("stored of all 40 classes (logarithmic)")
    axes.set_ylabel("accuracy on test photos")
    return figure


def drift_gap() -> Figure:
    """Accuracy along the tasks on digits: with true features, with adapted ones, and with those as they were stored."""

    def mean(method: str, values: Callable[[Result], Sequence[float | None]]) -> np.ndarray:
        results = [Result.load(RESULTS / "digits" / method / f"seed-{seed}" / "result.json") for seed in range(5)]
        return np.mean([values(each) for each in results], axis=0)

    classes = [2, 4, 6, 8, 10]
    ceiling = mean("features", lambda result: result.ceiling_curve)
    adapted = mean("features", lambda result: result.curve)
    unadapted = mean("features-unadapted", lambda result: result.curve)
    figure, axes = plt.subplots(figsize=(8.0, 3.8))
    for values, colour, name in (
        (ceiling, INK, "with true features\n(nobody has them)"),
        (adapted, OURS, "with adapted features\n(features)"),
        (unadapted, PAPER, "with features as stored\n(features-unadapted)"),
    ):
        axes.plot(classes, values, "o-", color=colour, linewidth=2)
        axes.annotate(name, (10, values[-1]), (10, -8), textcoords="offset points", color=colour, fontweight="bold")
    axes.fill_between(classes, adapted, ceiling, color=INK, alpha=0.12, linewidth=0)
    axes.fill_between(classes, unadapted, adapted, color=OURS, alpha=0.12, linewidth=0)
    axes.annotate("drift gap", (8.9, (ceiling[3] + adapted[4]) / 2 + 0.03), ha="center", color=INK)
    axes.annotate("recovered by adaptation", (7.9, (unadapted[3] + adapted[3]) / 2 - 0.01), ha="center", color=OURS)
    axes.set_xticks(classes)
    axes.set_xlim(1.8, 12.6)
    axes.set_ylim(0.5, 1.03)
    axes.set_xlabel("digits learned")
    axes.set_ylabel("accuracy on all digits so far")
    return figure


def drift() -> Figure:
    """The features of three digits before the network learns others, after it, and after adaptation."""
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))
    old, new = labels < 3, (labels >= 3) & (labels < 7)
    _train(network, images[old], labels[old])
    before = copy.deepcopy(network)
    _train(network, images[new], labels[new])
    with torch.no_grad():
        stored, true = F.normalize(before(images[old])), F.normalize(network(images[old]))
        adapter = RidgeAdapter().fit(Pairs(before(images[new]), network(images[new]), labels[new]))
    order = torch.cat(
        [torch.nonzero(labels[old] == digit)[:, 0][herd(stored[labels[old] == digit], 90)] for digit in range(3)]
    )
    stored, true, digit_of = stored[order], true[order], labels[old][order]  # herded: the most typical come first
    panels = (
        ("1. When the classes were learned", stored, stored),
        ("2. The network has learned other classes", true, stored),
        ("3. Stored features, adapted", true, adapter(stored)),
    )
    means = torch.stack([each[digit_of == digit].mean(0) for each in (stored, true) for digit in range(3)])
    axes_of_plane = torch.linalg.svd(means - means.mean(0)).Vh[:2].T  # (d, 2): the plane of the class means
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.5), sharex=True, sharey=True)
    for axis, (title, now, kept) in zip(axes, panels, strict=True):
        _panel(axis, title, now @ axes_of_plane, kept @ axes_of_plane, digit_of)
    handles = [
        plt.Line2D([], [], marker="o", linestyle="", color="#8a93a3", alpha=0.5, label="images, in today's network"),
        plt.Line2D([], [], marker="X", linestyle="", color=INK, markersize=9, label="stored features"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _train(network: nn.Module, images: Tensor, labels: Tensor) -> None:
    head = nn.Linear(32, 10)
    optimiser = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(200):
        loss = F.cross_entropy(head(network(images)), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def _panel(axis: plt.Axes, title: str, now: Tensor, kept: Tensor, labels: Tensor) -> None:
    for digit, colour in enumerate((OURS, PAPER, IMAGES)):
        these = labels == digit
        shown = kept[these][:9]
        axis.scatter(*now[these].T, s=14, color=colour, alpha=0.22, linewidths=0)
        axis.scatter(*shown.T, s=70, color=colour, marker="X", edgecolors="white", linewidths=0.8)
        start, end = shown.mean(0), now[these].mean(0)
        if (start - end).norm() > 0.25:
            arrow = {"arrowstyle": "->", "color": INK, "linewidth": 1.5}
            axis.annotate("", end.tolist(), start.tolist(), arrowprops=arrow)
    axis.set_title(title, fontsize=11, color=INK)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[["top", "right"]].set_visible(True)


def tutorial() -> list[Figure]:
    """The figures of the tutorial, by its own code."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        exec(compile(notebook.code(HERE / "tutorial.md"), "tutorial.md", "exec"), {})
    return [plt.figure(number) for number in plt.get_fignums()]


FIGURES: dict[str, Callable[[], Figure | list[Figure]]] = {
    "photos": photos,
    "bytes": accuracy_against_bytes,
    "gap": drift_gap,
    "drift": drift,
    "tutorial": tutorial,
}


def draw(name: str, folder: Path = HERE / "figures") -> list[Path]:
    """Draw one entry of FIGURES into SVG files."""
    with plt.rc_context(STYLE):
        made = FIGURES[name]()
        figures = made if isinstance(made, list) else [made]
        names = [name] if not isinstance(made, list) else [f"{name}-{number}" for number in range(1, len(made) + 1)]
        paths = [folder / f"{each}.svg" for each in names]
        for figure, path in zip(figures, paths, strict=True):
            figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close("all")
    return paths


if __name__ == "__main__":
    for chosen in sys.argv[1:] or FIGURES:
        print(*(path.relative_to(HERE.parent) for path in draw(chosen)))
