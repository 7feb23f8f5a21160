"""Every table of a report, as text for the page, CSV and LaTeX; and the commands that repeat its runs."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from engram.experiments.report.runs import Section, differing, distinct
from engram.text import csv_text

MINUS = "\N{MINUS SIGN}"
AVERAGES = {"top1": "average accuracy", "top5": "average top-5 accuracy"}
CURVES = {"top1": ("accuracy", "curve"), "top5": ("top-5 accuracy", "curve_top5")}
DRIFT = {"ω, previous task": "omega_previous", "ω, first task": "omega_first", "drift gap": "drift_gap"}
LATEX = str.maketrans(
    {
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "…": r"\dots{}"},
        **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "{''}", "–": "--"},
        **{each: f"\\{each}" for each in "{}$&#%_"},
        **{"[": "{[}", "*": "{*}"},  # after the end of a row they would be its arguments
        **{"±": r"$\pm$", MINUS: "$-$", "α": r"$\alpha$", "γ": r"$\gamma$", "λ": r"$\lambda$", "ω": r"$\omega$"},
    }
)

Format = Callable[[float], str]
Columns = dict[str, tuple[pd.DataFrame, Format]]  # by heading: `mean`, `std`, `low` and `high`, as far as known


@dataclass(frozen=True)
class Table:
    """A table as text, for the page and LaTeX, and as numbers, for CSV. The index names the rows."""

    caption: str
    text: pd.DataFrame
    numbers: pd.DataFrame
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column) of the values to emphasise

    @property
    def csv(self) -> str:
        """CSV in which no cell is a formula."""
        safe = self.numbers.map(lambda cell: csv_text(cell) if isinstance(cell, str) else cell)
        return str(safe.rename(index=csv_text, columns=csv_text).to_csv(lineterminator="\n"))

    @property
    def latex(self) -> str:
        """A tabular with the rules of booktabs, in which no name is a command."""
        safe = self.text.map(latex)
        for row, column in self.best:
            safe.iloc[row, column] = rf"\textbf{{{safe.iloc[row, column]}}}"
        safe = safe.rename(index=latex, columns=latex)
        return f"% {latex(self.caption)}\n{safe.to_latex(escape=False, column_format='l' + 'r' * safe.shape[1])}"


def latex(text: str) -> str:
    """The text for LaTeX, where nothing in it is a command."""
    return re.sub(r"\s+", " ", text).translate(LATEX)


def accuracy(value: float) -> str:
    """Three decimals without the leading zero: .458."""
    digits = f"{abs(value):.3f}"
    return (MINUS if value < 0 and float(digits) else "") + digits.removeprefix("0")


def amount(value: float) -> str:
    """Three significant digits: 0.0061, 14.2, 1,135."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def make_tables(section: Section) -> dict[str, Table]:
    """The results, what is best in what, the results by task, the settings that differ and those in common."""
    settings = section.groups["settings"]
    differ = differing(settings).set_index(settings.index).T.fillna("–")
    common = differing(settings, differ=False).T.iloc[:, :1].set_axis(["value"], axis="columns")
    return {
        "results": _results(section),
        **({"leaders": _leaders(section)} if section.comparable else {}),
        "tasks": _by_task(section),
        "settings": Table("Settings in which the groups differ", differ, differ),
        "common-settings": Table("Settings that all groups share", common, common),
    }


def _results(section: Section) -> Table:
    """Means over the seeds, and differences to the first contender over the seeds that both have."""
    lead, *others = section.metrics
    plain = {"after the last task": f"last_{lead}", **{AVERAGES[other]: other for other in others}}
    plain |= {"forgetting": "forgetting"} | (
        {"drift gap": "last_gap"} if section.runs["last_gap"].notna().any() else {}
    )
    amounts = {"memory, MB": "memory", "seconds": "seconds_total", "after training": "seconds_after"}
    columns: Columns = {AVERAGES[lead]: (section.spread(lead), accuracy)}
    if len(section.groups) > 1:
        paired = section.differences()[["mean", "low", "high"]].reindex(section.groups.index)
        columns[f"difference to {section.contenders.index[0]}"] = paired, accuracy
    for heading, column in plain.items():
        columns[heading] = section.spread(column)[["mean", "std"]], accuracy
    for heading, column in amounts.items():
        columns[heading] = section.spread(column)[["mean"]], amount
    caption = f"{section.title}: mean over the seeds ± standard deviation [95 % confidence interval]"
    table = _table(caption, columns, frozenset(_best(section, columns)))
    table.text.loc[section.groups["shares_training"], "seconds"] += "*"
    for frame in (table.text, table.numbers):
        frame["seeds"] = section.groups["seeds"].map(ranges)
    return table


def _best(section: Section, columns: Columns) -> Iterable[tuple[int, int]]:
    """The best values of the contenders, if these have the same seeds and do not all look the same."""
    if not section.comparable:
        return
    for column, (heading, (stats, write)) in enumerate(columns.items()):
        if heading in ("seconds", "after training") or heading.startswith("difference"):
            continue
        means = stats["mean"][section.contenders.index].dropna()
        best = write(means.min() if heading in ("forgetting", "drift gap", "memory, MB") else means.max())
        rows = [section.groups.index.get_loc(label) for label, mean in means.items() if write(mean) == best]
        if len(rows) < len(section.contenders):
            yield from ((row, column) for row in rows)


def _leaders(section: Section) -> Table:
    """The best contender by each measure, also among those with little memory, and its difference to the next."""
    lead, names, memory = section.metrics[0], section.contenders.index, section.spread("memory")["mean"]
    rows = [(AVERAGES[lead], lead, names), ("after the last task", f"last_{lead}", names)]
    rows.append(("forgetting", "forgetting", names))
    for label in section.front[:-1]:
        among = names[memory[names] <= memory[label]]
        rows.append((f"{AVERAGES[lead]}, at most {amount(memory[label])} MB", lead, among))
    text, numbers = {}, {}
    for heading, column, among in rows:
        stats = section.spread(column).loc[among]
        best, *others = stats["mean"].sort_values(ascending=column == "forgetting", kind="stable").index[:2]
        value = stats.loc[best, ["mean", "std"]].to_dict()
        text[heading] = {"best": best, "value": _cell(value, accuracy), "next": "–", "difference": "–"}
        numbers[heading] = {"best": best, "value": value["mean"]}
        for other in others:
            difference = section.differences(other, column).loc[best, ["mean", "low", "high"]].to_dict()
            text[heading] |= {"next": other, "difference": _cell(difference, accuracy)}
            numbers[heading] |= {"next": other} | {f"difference, {part}": each for part, each in difference.items()}
    caption = (
        f"{section.title}: the best, and its difference to the next over the same seeds [95 % confidence interval]"
    )
    return Table(caption, *(pd.DataFrame.from_dict(each, orient="index") for each in (text, numbers)))


def _by_task(section: Section) -> Table:
    rows = dict(CURVES[metric] for metric in section.metrics) | DRIFT
    stats = pd.concat(
        section.spread_by_task(column).dropna(how="all").rename(lambda group, row=row: f"{group}: {row}", level="group")
        for row, column in rows.items()
    )
    headings = distinct(f"{seen} classes" for seen in section.first["classes_seen"])
    columns: Columns = {heading: (stats.xs(task, level="task"), accuracy) for task, heading in enumerate(headings)}
    return _table(f"{section.title}, after each task: mean over the seeds ± standard deviation", columns)


def _table(caption: str, columns: Columns, best: frozenset[tuple[int, int]] = frozenset()) -> Table:
    text, numbers = {}, {}
    for heading, (stats, write) in columns.items():
        text[heading] = pd.Series([_cell(row, write) for row in stats.to_dict("records")], stats.index, dtype=object)
        for part, values in stats.dropna(axis="columns", how="all").items():
            numbers[heading if part == "mean" else f"{heading}, {part}"] = values
    return Table(caption, pd.DataFrame(text).fillna("–"), pd.DataFrame(numbers), best)


def _cell(stats: Mapping[str, float], write: Format) -> str:
    """`.984 ± .003 [.980, .988]`, or as much of it as is known."""
    if pd.isna(stats["mean"]):
        return "–"
    spread = f" ± {write(stats['std'])}" if stats.get("std", 0) > 0 else ""
    interval = f" [{write(stats['low'])}, {write(stats['high'])}]" if pd.notna(stats.get("low")) else ""
    return write(stats["mean"]) + spread + interval


def environment_table(runs: pd.DataFrame) -> Table:
    """What the results were made with: every value that occurs."""
    recorded = pd.DataFrame(list(runs["environment"]), dtype=object).fillna("not recorded")
    values = recorded.apply(lambda values: "; ".join(sorted({*values}))).to_frame("value")
    return Table("Environment", values, values)


def _consecutive(seeds: Iterable[int]) -> list[list[int]]:
    pairs = enumerate(sorted(seeds))
    return [[seed for _, seed in run] for _, run in itertools.groupby(pairs, lambda pair: pair[1] - pair[0])]


def ranges(seeds: Iterable[int]) -> str:
    """Seeds, consecutive ones as a range: 0–4, 7."""
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in _consecutive(seeds))


def commands(section: Section, label: str) -> list[str]:
    """The commands that repeat a group's runs, one per range of seeds; none where no command makes the tasks."""
    group, run, split = section.groups.loc[label], section.first, section.first["split"]
    # Published data have no fingerprint: their name says what they are.
    source = split.get("source", {} if "data" in split else {"dataset": run["dataset"]})
    if pd.isna(run["classes_per_task"]) or not source or not isinstance(source, dict):
        return []
    order = split.get("class_order", "seed")
    flags = {
        **{name: source.get(name) for name in ("dataset", "data", "image_size", "fit", "class_list")},
        **{"classes_per_task": int(run["classes_per_task"]), "tasks": len(run["classes_seen"])},
        **{"first_task": split.get("first_task"), "validation": split.get("validation") or None},
        "class_order": None if order == "seed" else order if isinstance(order, str) else "ORDER.txt",
    }
    words = ["engram", "run", group["method"]]
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    for name, value in group["settings"].items():
        items = value if isinstance(value, list) else [value]
        words += ["--set", f"{name}={','.join('none' if item is None else str(item) for item in items)}"]
    starts = [["--seed", str(seeds[0]), "--seeds", str(len(seeds))] for seeds in _consecutive(group["seeds"])]
    return [shlex.join([*words, *(start if start[-1] != "1" else start[:2])]) for start in starts]
