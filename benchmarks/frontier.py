"""Draws docs/frontier.svg: accuracy against bytes kept, on CIFAR-100, from the result files that RESULTS.md names.

python benchmarks/frontier.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

from engram.experiments import Result

HERE = Path(__file__).parent
OUT = HERE.parent / "docs" / "frontier.svg"

LEFT, RIGHT, TOP, BOTTOM = 64, 840, 20, 330  # of the axes, in pixels
SMALLEST, LARGEST = 0.03, 120.0  # MB
LOWEST, HIGHEST = 0.41, 0.56

TICKS = {0.05: "50 KB", 0.15: "150 KB", 0.75: "750 KB", 3: "3 MB", 10: "10 MB", 73: "73 MB"}

STYLE = """
    text, circle { fill: currentColor } polyline { fill: none; stroke: currentColor; stroke-width: 2.5 }
    .axes { color: #4a5568 } .axes line { stroke: #8a94a6; stroke-opacity: .4 }
    .ours { color: #3c7a45; font-weight: 600 } .paper { color: #b5772a; font-weight: 600 } .images { color: #4a5a78 }
    @media (prefers-color-scheme: dark) {
      .axes { color: #b4bfd2 } .ours { color: #79b983 } .paper { color: #dba65c } .images { color: #93a4c4 }
    }"""


@dataclass(frozen=True)
class Series:
    """Results of one method, and where its name stands, in pixels from the last of them."""

    name: str
    kind: str  # ours, paper or images: the colour
    folders: tuple[str, ...]
    aside: tuple[int, int] = (10, 5)
    anchor: str = "start"


SERIES = (
    Series(
        "engram (ours): features, a byte a number or less",
        "ours",
        (
            "cifar100-budgets/engram-0.05MB",
            "cifar100-budgets/engram-0.15MB",
            "cifar100-table1/engram-pq-16th",
            "cifar100-budgets/engram-0.3MB",
            "cifar100-table1/engram-pq-8th",
            "cifar100-table1/engram",
            "cifar100-budgets/engram-10MB",
        ),
        (-150, -16),
        "middle",
    ),
    Series(
        "features (the paper's)",
        "paper",
        (
            "cifar100-budgets/features-0.15MB",
            "cifar100-budgets/features-0.3MB",
            "cifar100-budgets/features-1MB",
            "cifar100-table1/features",
            "cifar100-budgets/features-10MB",
        ),
        (-290, 0),
        "middle",
    ),
    Series("hybrid (the paper's)", "paper", ("cifar100-table1/hybrid",), (-6, -12), "end"),
    Series("hybrid on LUCIR's training", "paper", ("cifar100-table1/hybrid-on-lucir",), (10, 5)),
    Series("γ-iCaRL", "images", ("cifar100-table1/gamma-icarl", "cifar100-budgets/gamma-icarl-10MB")),
    Series("iCaRL", "images", ("cifar100-table1/icarl", "cifar100-budgets/icarl-10MB")),
    Series("BiC", "images", ("cifar100-table1/bic",), (10, -2)),
    Series("LUCIR", "images", ("cifar100-table1/lucir",), (10, 12)),
    Series("EEIL", "images", ("cifar100-table1/eeil",), (10, 5)),
    Series("joint: every image", "images", ("cifar100-table1/joint",), (36, -12), "end"),
)


def across(megabytes: float) -> float:
    """Where so many bytes are: a logarithmic axis."""
    return LEFT + (RIGHT - LEFT) * math.log(megabytes / SMALLEST) / math.log(LARGEST / SMALLEST)


def down(accuracy: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * (accuracy - LOWEST) / (HIGHEST - LOWEST)


def drawn(series: Series) -> list[str]:
    results = [Result.load(HERE / "results" / folder / "result.json") for folder in series.folders]
    points = [(across(result.memory_bytes / 2**20), down(result.average_incremental_accuracy)) for result in results]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    (x, y), (right, lower) = points[-1], series.aside
    return [
        f'<g class="{series.kind}">',
        *([f'<polyline points="{line}"/>'] if len(points) > 1 else []),
        *(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="5"/>' for left, top in points),
        f'<text x="{x + right:.1f}" y="{y + lower:.1f}" text-anchor="{series.anchor}">{escape(series.name)}</text>',
        "</g>",
    ]


def axes() -> list[str]:
    parts = ['<g class="axes">', f'<line x1="{LEFT}" y1="{BOTTOM}" x2="{RIGHT}" y2="{BOTTOM}"/>']
    for hundredths in range(42, 57, 2):
        y = down(hundredths / 100)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 5:.1f}" text-anchor="end">.{hundredths}</text>')
    for megabytes, label in TICKS.items():
        parts.append(f'<text x="{across(megabytes):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{label}</text>')
    caption = "kept of 50 classes, all together (logarithmic); up: average accuracy over five tasks"
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 42}" text-anchor="middle">{caption}</text>')
    return [*parts, "</g>"]


def main() -> None:
    body = [*axes(), *(part for series in SERIES for part in drawn(series))]
    described = "Average accuracy against the bytes that each method keeps; the numbers are in RESULTS.md."
    OUT.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {RIGHT + 20} {BOTTOM + 56}" '
        'font-family="system-ui, sans-serif" font-size="14" role="img" aria-labelledby="t d">\n'
        f'  <title id="t">Accuracy against memory on CIFAR-100</title>\n  <desc id="d">{described}</desc>\n'
        f"  <style>{STYLE}\n  </style>\n  " + "\n  ".join(body) + "\n</svg>\n",
        encoding="utf-8",
    )
    print(OUT.relative_to(HERE.parent))


if __name__ == "__main__":
    main()
