"""The figures there are, in the order in which a page shows them."""

from __future__ import annotations

from engram.experiments.report.bars import forgetting, times
from engram.experiments.report.lines import curves, drift, memory, values
from engram.experiments.report.maps import matrices
from engram.experiments.report.plot import Plot, Styles
from engram.experiments.report.sections import Section


def plots(section: Section, styles: Styles) -> list[Plot]:
    """Every figure that the section's results have numbers for."""
    makers = (curves, values, memory, drift, matrices, forgetting, times)
    return [plot for maker in makers if (plot := maker(section, styles)) is not None]
