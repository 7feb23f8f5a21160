"""Tables: what is in them, and how they are written as LaTeX and CSV. The page shows the same ones."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from engram.experiments.aggregate import Group, Spread, differing, measured, shown, without_seed
from engram.experiments.identity import spoken_objective, unrecorded
from engram.experiments.report import text
from engram.experiments.report.sections import Section
from engram.text import csv_text


class Quantity(NamedTuple):
    """A mean with its deviation over the seeds, and how such numbers are written."""

    spread: Spread
    written: Callable[[float], str] = text.accuracy


Cell = str | Quantity | None
NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings; the first cell of a row names it."""

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column) of the best values
    notes: tuple[str, ...] = field(default=())


def cell_text(cell: Cell) -> str:
    """A cell as it is read."""
    if cell is None:
        return NOTHING
    if isinstance(cell, str):
        return cell
    (mean, deviation), written = cell
    # Memory is the same for every seed, as a rule, and then needs no "± 0".
    spread = "" if deviation is None or (not deviation and written is text.megabytes) else f" ± {written(deviation)}"
    return written(mean) + spread


class Measure(NamedTuple):
    """A column of the results: one of aggregate.NUMBERS."""

    number: str
    heading: str
    written: Callable[[float], str]
    sign: int  # 1: more is better; -1: less is


MEASURES = (
    Measure("average", "average accuracy", text.accuracy, 1),
    Measure("last", "after the last task", text.accuracy, 1),
    Measure("forgetting", "forgetting", text.accuracy, -1),
    Measure("memory", "kept, MB", text.megabytes, -1),
    Measure("seconds", "seconds", text.seconds, -1),
)


def results_table(section: Section) -> Table:
    """The groups of a section with their means; the best that compete are marked, where they may be compared."""
    rows = [_row(group) for group in section.groups]
    return Table(
        name="results",
        caption=f"{section.title}. Mean over the seeds, ± the standard deviation between them.",
        columns=("", *(measure.heading for measure in MEASURES), "seeds"),
        rows=tuple(rows),
        best=_best(section, rows),
        notes=("The seconds are without those of measuring.", *_notes(section)),
    )


def _row(group: Group) -> tuple[Cell, ...]:
    cells: list[Cell] = [group.label + (" (bound)" if group.is_bound else "")]
    for measure in MEASURES:
        spread = measured(group, measure.number)
        cells.append(None if spread is None else Quantity(spread, measure.written))
    return (*cells, text.integers(group.seeds))


def _best(section: Section, rows: Sequence[Sequence[Cell]]) -> frozenset[tuple[int, int]]:
    competing = [index for index, group in enumerate(section.groups) if group in section.contenders]
    if len({section.groups[index].seeds for index in competing}) > 1 or len(competing) < 2:
        return frozenset()
    marked = set()
    for column, measure in enumerate(MEASURES, start=1):
        if measure.number == "seconds" and not all(section.groups[index].trained for index in competing):
            continue
        cells = {index: rows[index][column] for index in competing}
        means = {index: measure.sign * cell.spread.mean for index, cell in cells.items() if isinstance(cell, Quantity)}
        top = max(means, key=means.__getitem__)
        same = [index for index in means if _same_text(cells[index], cells[top])]
        marked |= {(index, column) for index in same if len(same) < len(means)}
    return frozenset(marked)


def _same_text(one: Cell, other: Cell) -> bool:
    """Whether two numbers look the same as they are written: then neither is shown as the better one."""
    return isinstance(one, Quantity) and isinstance(other, Quantity) and _mean(one) == _mean(other)


def _mean(cell: Quantity) -> str:
    return cell.written(cell.spread.mean)


def _notes(section: Section) -> list[str]:
    notes = []
    if len({group.seeds for group in section.contenders}) > 1:
        notes.append(
            "These groups were run with different seeds, and much depends on the seed: their means must not be "
            "compared. What is said in words compares only the seeds that both have; no best values are marked."
        )
    elif not section.same_seeds:
        notes.append("A bound was run with other seeds than the rest: its mean must not be compared with theirs.")
    if any(group.is_bound for group in section.groups) and len(section.contenders) < len(section.groups):
        notes.append(
            "A bound does not compete: joint trains anew on everything seen, finetune does nothing about the past."
        )
    untrained = [group.label for group in section.groups if not group.trained]
    if untrained:
        notes.append(
            f"Without the time for training, or some of it, that was shared with other runs: {text.listed(untrained)}. "
            "The others' seconds include all of it."
            if len(untrained) < len(section.groups)
            else "The seconds are without the time for training, or some of it, that was shared with other runs."
        )
    return notes


def settings_tables(section: Section) -> tuple[Table | None, Table]:
    """The settings in which the groups differ, a column for each group, and those that all have in common."""
    settings = [without_seed(result.settings) for group in section.groups for result in group.results]
    names = differing(settings)
    rows = [(name, *(_values(group, name) for group in section.groups)) for name in names]
    columns = ("setting", *(group.label for group in section.groups))
    apart = Table("settings", "The settings in which these groups differ.", columns, tuple(rows)) if rows else None
    common = [(name, _named(name, value)) for name, value in settings[0].items() if name not in names]
    return apart, Table("common-settings", "The settings that all of them share.", ("setting", "value"), tuple(common))


def in_blocks(table: Table, columns: int = 5) -> list[Table]:
    """The same in tables of so many columns beside the first: all of them at once would not fit on paper."""
    starts = range(1, len(table.columns), columns)
    chosen = [(0, *range(start, min(start + columns, len(table.columns)))) for start in starts]
    return [
        replace(
            table,
            columns=tuple(table.columns[place] for place in places),
            rows=tuple(tuple(row[place] for place in places) for row in table.rows),
        )
        for places in chosen
    ]


def _named(name: str, value: Any) -> str:
    """A setting's value; of an objective the name that it is set by."""
    return shown(spoken_objective(value) if name == "objective" else value)


def _values(group: Group, name: str) -> str | None:
    settings = [{**unrecorded(group.method), **result.settings} for result in group.results]
    values = [_named(name, each[name]) for each in settings if name in each]
    return "; ".join(dict.fromkeys(values)) if values else None


def environment_table(sections: Sequence[Section]) -> Table:
    """What the results were made with; where they differ, how many were made with what."""
    results = [result for section in sections for group in section.groups for result in group.results]
    rows = []
    for name in dict.fromkeys(name for result in results for name in result.environment):
        values = [result.environment.get(name, "not recorded") for result in results]
        counts = {value: values.count(value) for value in sorted(set(values))}
        alike = len(counts) == 1
        rows.append((name, values[0] if alike else "; ".join(f"{value} ({n} results)" for value, n in counts.items())))
    return Table("environment", "What the results were made with.", ("", "value"), tuple(rows))


def as_csv(table: Table) -> str:
    """The table as CSV: numbers in full, deviations in columns of their own."""
    spreads = [any(_has_deviation(row[place]) for row in table.rows) for place in range(len(table.columns))]
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    headings = [
        [csv_text(name), *([csv_text(f"{name}, deviation")] if spread else [])]
        for name, spread in zip(table.columns, spreads, strict=True)
    ]
    writer.writerow([each for heading in headings for each in heading])
    for row in table.rows:
        cells = [_csv_cells(cell, spread) for cell, spread in zip(row, spreads, strict=True)]
        writer.writerow([each for cell in cells for each in cell])
    return output.getvalue()


def _has_deviation(cell: Cell) -> bool:
    return isinstance(cell, Quantity) and cell.spread.deviation is not None


def _csv_cells(cell: Cell, spread: bool) -> list[str | float | None]:
    if isinstance(cell, Quantity):
        scale = 2**20 if cell.written is text.megabytes else 1
        mean, deviation = cell.spread
        return [mean / scale, *([None if deviation is None else deviation / scale] if spread else [])]
    return [None if cell is None else csv_text(cell), *([None] if spread else [])]


def as_latex(table: Table) -> str:
    """The table as a LaTeX tabular, with the rules of booktabs."""
    lines = [
        f"% {text.latex(table.caption)}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
        r"\toprule",
        " & ".join(text.latex(name) for name in table.columns) + r" \\",
        r"\midrule",
    ]
    for number, row in enumerate(table.rows):
        cells = [_latex_cell(cell, (number, place) in table.best) for place, cell in enumerate(row)]
        # After the end of a row, LaTeX takes [ and * for its own, wherever they stand.
        lines.append(("{}" if cells[0].lstrip().startswith(("[", "*")) else "") + " & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_cell(cell: Cell, best: bool) -> str:
    if not isinstance(cell, Quantity):
        return text.latex(cell_text(cell))
    mean, _, deviation = cell_text(cell).replace(text.MINUS, "-").replace(",", "{,}").partition(" ± ")
    number = rf"\mathbf{{{mean}}}" if best else mean
    spread = rf" \pm {deviation}" if deviation else ""
    return f"${number}{spread}$"
