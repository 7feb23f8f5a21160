"""The summary in words: what was found, said only of seeds that were compared with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations

from engram.experiments.aggregate import Difference, Group, common_seeds, curve, measured, paired, without_seed
from engram.experiments.report.sections import Section
from engram.experiments.report.text import accuracy, integers, listed, megabytes, named, times


def findings(section: Section) -> list[str]:
    """Sentences on a section, the most important first. A part that its results say nothing about is left out."""
    parts: tuple[Callable[[Section], list[str]], ...] = (_best, _bound, _adaptation, _drift, _quality, _memory)
    return [sentence for part in parts for sentence in part(section)]


def along_values(section: Section) -> list[str]:
    """What came out where a suite varies a value: for each series the best value, and how far it is from the worst."""
    sentences = []
    for series in dict.fromkeys(group.series for group in section.groups):
        groups = [group for group in section.groups if group.series == series and group.value is not None]
        ranked, seeds = _ranked(groups)
        if len(ranked) < 2:
            continue
        best, worst = ranked[0], ranked[-1]
        if _reaches(best, seeds) == _reaches(worst, seeds):
            sentences.append(f"{named(series)}: accuracy is {_reaches(best, seeds)} at every value.")
            continue
        sentences.append(
            f"{named(series)}: accuracy is highest at {_alike(ranked, best, seeds)} ({_reaches(best, seeds)}) and "
            f"lowest at {_alike(ranked, worst, seeds)} ({_reaches(worst, seeds)}); {_compared(best, worst, seeds)}."
        )
        sentences += _best_omega(ranked, best, seeds)
    return sentences


def _alike(groups: Sequence[Group], one: Group, seeds: Sequence[int]) -> str:
    """The names of those that are as accurate as this one, to three digits."""
    return listed([named(group.label) for group in groups if _reaches(group, seeds) == _reaches(one, seeds)])


def _best_omega(groups: Sequence[Group], best: Group, seeds: Sequence[int]) -> list[str]:
    means = {group.label: spread.mean for group in groups if (spread := measured(group, "omega", seeds))}
    if len({accuracy(mean) for mean in means.values()}) < 2:
        return []
    top = max(means, key=means.__getitem__)
    where = "there too" if top == best.label else f"at {named(top)}"
    return [f"ω is highest {where} ({accuracy(means[top])})."]


def _ranked(groups: Iterable[Group]) -> tuple[list[Group], tuple[int, ...]]:
    """The groups that share seeds, the most accurate on these first, and the seeds.

    Where not all share the same seeds, those are taken that leave most results in the comparison.
    """
    groups = list(groups)
    all_share = common_seeds(*groups) if len(groups) > 1 else ()
    alike = all(group.seeds == all_share for group in groups)
    shared = {all_share} if alike else {all_share, *(common_seeds(*pair) for pair in combinations(groups, 2))}
    choices = {seeds: [group for group in groups if set(seeds) <= set(group.seeds)] for seeds in shared if seeds}
    choices = {seeds: members for seeds, members in choices.items() if common_seeds(*members)}
    if not choices:
        return groups[:1], groups[0].seeds if groups else ()
    seeds = max(choices, key=lambda seeds: (len(seeds) * len(choices[seeds]), len(choices[seeds]), seeds))
    members = choices[seeds]
    means = {group.label: spread.mean for group in members if (spread := measured(group, "average", seeds))}
    return sorted(members, key=lambda group: (-means[group.label], group.label)), seeds


def _best(section: Section) -> list[str]:
    if len(section.contenders) == 1:
        only = section.contenders[0]
        reached = f"reaches an average incremental accuracy of {_reaches(only, only.seeds)} ({_on(only.seeds)})"
        return [f"{named(only.label)} {reached}."]
    ranked, seeds = _ranked(section.contenders)
    if len(ranked) < 2:
        return ["The groups share no seed on the same order of classes, so none of them is called the best."]
    return [_first_and_second(ranked, seeds), *_left_out(section, ranked)]


def _first_and_second(ranked: Sequence[Group], seeds: Sequence[int]) -> str:
    best, second = ranked[:2]
    if len(ranked) == 2:
        return (
            f"{named(best.label)} reaches an average incremental accuracy of {_reaches(best, seeds)}, "
            f"{named(second.label)} {_reaches(second, seeds)} ({_on(seeds)}); {_compared(best, second, seeds)}."
        )
    if _reaches(best, seeds) == _reaches(second, seeds):
        return (
            f"{_alike(ranked, best, seeds)} have the highest average incremental accuracy of {len(ranked)}, "
            f"{_reaches(best, seeds)} ({_on(seeds)})."
        )
    return (
        f"{named(best.label)} has the highest average incremental accuracy of {len(ranked)}: {_reaches(best, seeds)} "
        f"({_on(seeds)}). Next is {named(second.label)} with {_reaches(second, seeds)}; "
        f"{_compared(best, second, seeds)}."
    )


def _left_out(section: Section, ranked: Sequence[Group]) -> list[str]:
    others = [group for group in section.contenders if group not in ranked]
    names = [f"{named(group.label)} ({_seeds(group.seeds)})" for group in others]
    return [f"Not compared, for want of the same seeds: {listed(names)}."] if names else []


def _reaches(group: Group, seeds: Sequence[int]) -> str:
    spread = measured(group, "average", seeds)
    return accuracy(spread.mean) if spread else "–"


def _on(seeds: Sequence[int]) -> str:
    return f"{_seeds(seeds)} alone" if len(seeds) == 1 else f"mean over {_seeds(seeds)}"


def _seeds(seeds: Sequence[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {integers(seeds)}"


def _compared(a: Group, b: Group, seeds: Sequence[int]) -> str:
    """The difference between two groups on these seeds, with what may be concluded from it."""
    difference = paired(a, b, seeds)
    if difference is None:
        if not seeds:
            return "they share no seed, so the two are not compared"
        one, other = measured(a, "average", seeds), measured(b, "average", seeds)
        assert one is not None and other is not None
        return f"the difference is {accuracy(one.mean - other.mean)} on one seed, which gives no interval"
    words = f"the difference is {accuracy(difference.mean)} ({_interval(difference)})"
    return words if difference.is_clear else f"{words}: too uncertain to call one of them better"


def _interval(difference: Difference) -> str:
    count = len(difference.seeds)
    return (
        f"95 % interval {accuracy(difference.low)} to {accuracy(difference.high)}, "
        f"ahead on {difference.wins} of {count} seeds"
    )


def _bound(section: Section) -> list[str]:
    """How far the best is from training on everything."""
    bounds = [group for group in section.groups if group.method == "joint"]
    ranked, _ = _ranked(section.contenders)
    if not bounds or not ranked or bounds[0] in ranked or not (seeds := common_seeds(bounds[0], ranked[0])):
        return []
    bound, best = bounds[0], ranked[0]
    return [
        f"Training on everything at once ({named(bound.label)}) reaches {_reaches(bound, seeds)} on the same seeds, "
        f"against {_reaches(best, seeds)} of {named(best.label)}."
    ]


def _adaptation(section: Section) -> list[str]:
    """What it is worth to adapt stored vectors, where all other settings are the same."""
    pairs = [
        (adapted, other)
        for adapted in section.groups
        for other in section.groups
        if (adapted.method, other.method) == ("features", "features-unadapted")
        and _but_for_the_adapter(adapted) == _but_for_the_adapter(other)
    ]
    if len(pairs) == 1 and len(section.contenders) == 2:
        return []  # it is the one comparison that was made already
    if len(pairs) == 1:
        gained = _compared(*pairs[0], common_seeds(*pairs[0]))
        return [f"Adapting the stored vectors, against leaving them as they are: {gained}."]
    clear = [difference for pair in pairs if (difference := paired(*pair))]
    if not clear:
        return []
    means = [difference.mean for difference in clear]
    return [
        f"Adapting the stored vectors, against leaving them as they are, gains from {accuracy(min(means))} to "
        f"{accuracy(max(means))} in the {len(clear)} settings that were run both ways."
    ]


def _but_for_the_adapter(group: Group) -> dict[str, object]:
    settings = without_seed(group.results[0].settings)
    return {name: value for name, value in settings.items() if not name.startswith("adapter")}


def _drift(section: Section) -> list[str]:
    """Where the best group that stores vectors loses accuracy: to drift, or because the network cannot tell."""
    ranked, seeds = _ranked(section.contenders)
    storing = [group for group in ranked if measured(group, "gap", seeds)]
    if not storing or section.tasks < 2:
        return []
    group = storing[0]
    gap, last, ceiling = (measured(group, name, seeds) for name in ("gap", "last", "ceiling"))
    assert gap is not None and last is not None and ceiling is not None
    if gap.mean <= 0:
        gain = f"had no stored vector drifted, it would gain {accuracy(gap.mean)}"
        return [f"Drift costs {named(group.label)} nothing: {gain}."]
    return [
        f"After the last task {named(group.label)} is right on {accuracy(last.mean)}. Had no stored vector drifted it "
        f"would be right on {accuracy(ceiling.mean)}: of what it misses, {accuracy(gap.mean)} is lost to drift, and "
        f"{accuracy(1 - ceiling.mean)} because the network does not tell the classes apart."
    ]


def _quality(section: Section) -> list[str]:
    """How well stored vectors follow the network: of the best group, or of all where that is what a suite is about."""
    ranked, seeds = _ranked(section.contenders)
    storing = [
        group for group in ranked if all(_means(group, f"omega_{which}", seeds) for which in ("previous", "first"))
    ]
    told = storing[:4] if section.suite and not section.varies else storing[:1]
    sentences = []
    for group in told:
        previous, first = (_means(group, name, seeds) for name in ("omega_previous", "omega_first"))
        low, high = accuracy(min(previous)), accuracy(max(previous))
        lies = f"lies between {low} and {high} along the tasks" if low != high else f"is {low}"
        name = named(group.label)
        sentences.append(
            f"ω of the previous task's vectors {lies} for {name}; at the end ω of the first task's is "
            f"{accuracy(first[-1])}."
        )
    return sentences


def _means(group: Group, name: str, seeds: Sequence[int]) -> list[float]:
    chosen = tuple(result for result in group.results if result.seed in seeds)
    return [point.mean for point in curve(replace(group, results=chosen), name) if point is not None]


def _memory(section: Section) -> list[str]:
    """What the best keeps, beside the others that keep something else."""
    ranked, _ = _ranked(section.contenders)
    if not ranked:
        return []
    best, mine = ranked[0], _kept(ranked[0])
    if not mine:
        return [f"{named(best.label)} keeps nothing of old classes."]
    rivals = [*ranked[1:], *(group for group in section.groups if group.method == "joint" and group not in ranked)]
    # One rival for each size: methods that keep the same are told apart by accuracy, not here.
    sizes = {size: rival for rival in reversed(rivals) if (size := _kept(rival)) and _differs(size, mine)}
    words = [
        f"{named(rival.label)} {megabytes(size)} MB ({_ratio(size, mine)})" for size, rival in sorted(sizes.items())
    ]
    kept = f"{named(best.label)} keeps {megabytes(mine)} MB of old classes"
    return [f"{kept}; {listed(words[:4])}." if words else f"{kept}."]


def _differs(size: float, mine: float) -> bool:
    return not 1 / 1.05 < size / mine < 1.05


def _kept(group: Group) -> float:
    spread = measured(group, "memory")
    return spread.mean if spread else 0.0


def _ratio(size: float, mine: float) -> str:
    return f"{times(size / mine)} times as much" if size > mine else f"{times(mine / size)} times less"
