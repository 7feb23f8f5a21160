"""The figures: which there are, where things lie in them, how they look, and the files they become."""

import io
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import pytest
from made_results import METHODS as MADE
from made_results import every_method, result, save, save_suite
from matplotlib.figure import Figure
from PIL import Image

from engram.experiments.report import Part, make_report
from engram.experiments.report.figures import (
    ABLATIONS,
    COLOURS,
    HUES,
    INK,
    METHODS,
    MUTED,
    PAGE,
    WIDTH,
    drawing,
    fit,
    text_width,
)
from engram.experiments.results import Result
from engram.methods import METHODS as REAL_METHODS


def only(folder: Path, *results: Result) -> Part:
    (part,) = make_report([save(folder, *results)]).parts
    return part


def figure(part: Part, name: str) -> Figure:
    found = next(plot.figure for plot in part.plots if plot.name == name)
    with drawing():
        found.draw_without_rendering()
    return found


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Part:
    (part,) = make_report([save_suite(tmp_path_factory.mktemp("suite"), [0, 0.1, 10, 1000])]).parts
    return part


def test_there_is_a_figure_for_everything_that_was_measured(tmp_path: Path, suite: Part) -> None:
    def names(folder: str, *runs: Result) -> list[str]:
        return [plot.name for plot in only(tmp_path / folder, *runs).plots]

    every = ["accuracy", "memory", "drift", "matrix", "forgetting", "time"]
    assert names("features", result("features"), result("lwf")) == every
    assert names("lwf", result("lwf"), result("finetune")) == ["accuracy", "matrix", "forgetting", "time"]
    assert names("one task", result("lwf", curve=[0.5], seconds={})) == ["accuracy"]
    assert [plot.name for plot in suite.plots][:3] == ["accuracy", "value", "memory"]


def test_curves_are_drawn_where_the_means_are(tmp_path: Path) -> None:
    part = only(tmp_path, *(result("features", seed, [0.9, 0.6 + 0.1 * seed, 0.5]) for seed in (0, 1)))
    (axes,) = figure(part, "accuracy").axes
    (line,) = axes.lines
    assert [list(map(float, values)) for values in line.get_data()] == [[2, 4, 6], pytest.approx([0.9, 0.65, 0.5])]
    (band,) = axes.collections
    around = sorted(point[1] for point in band.get_paths()[0].vertices if point[0] == 4)  # type: ignore[index,union-attr]
    assert (around[0], around[-1]) == pytest.approx((0.65 - math.sqrt(0.005), 0.65 + math.sqrt(0.005)))


def test_one_seed_and_many_groups_have_no_bands(tmp_path: Path) -> None:
    assert not figure(only(tmp_path / "one", result()), "accuracy").axes[0].collections
    many = only(tmp_path / "many", *every_method(tasks=2, seeds=2))
    assert not figure(many, "accuracy").axes[0].collections and "bands" not in many.plots[0].caption


@pytest.mark.parametrize(("curve", "from_zero"), [([0.98, 0.96, 0.92], False), ([0.98, 0.96, 0.2], True)])
def test_accuracy_begins_at_zero_unless_all_values_are_high(
    curve: list[float], from_zero: bool, tmp_path: Path
) -> None:
    low, high = figure(only(tmp_path, result(curve=curve)), "accuracy").axes[0].get_ylim()
    assert (low == 0) == from_zero and high <= 1.02


def test_no_memory_lies_at_the_left_end_of_the_logarithmic_axis(tmp_path: Path) -> None:
    (axes,) = figure(only(tmp_path, *every_method(tasks=2, seeds=1)), "memory").axes
    assert axes.get_xscale() == "log" and axes.get_xticklabels()[0].get_text() == "0"
    places = sorted(float(line.get_xdata()[0]) for line in axes.lines if len(line.get_xdata()) == 1)  # type: ignore[arg-type,index]
    assert places[0] == axes.get_xticks()[0] < 5.86 / 2 and places[-1] == pytest.approx(146.5, abs=1e-3)


def test_a_line_steps_from_the_best_at_each_memory_to_the_next_and_names_them(tmp_path: Path) -> None:
    levels = {"features": 0.5, "hybrid": 0.7, "icarl": 0.6, "eeil": 0.4, "lwf": 0.3, "gamma-lwf": 0.2}
    part = only(tmp_path, *(result(method, curve=[level]) for method, level in levels.items()))
    (axes,) = figure(part, "memory").axes
    (line,) = (each for each in axes.lines if len(each.get_xdata()) == 3)  # type: ignore[arg-type]
    assert list(line.get_ydata()) == [0.3, 0.6, 0.7]  # type: ignore[arg-type]
    assert [text.get_text() for text in axes.texts] == ["lwf", "icarl", "hybrid"]


def test_values_that_span_more_than_fifty_times_are_on_a_logarithmic_axis(suite: Part, tmp_path: Path) -> None:
    accuracy, omega = figure(suite, "value").axes
    assert accuracy.get_xscale() == omega.get_xscale() == "log"
    assert [tick.get_text() for tick in omega.get_xticklabels()] == ["0", "0.1", "1", "10", "100", "1,000"]
    (linear,) = make_report([save_suite(tmp_path, [1, 2, 4])]).parts
    assert figure(linear, "value").axes[0].get_xscale() == "linear"


def test_each_series_of_a_sweep_is_a_line_through_its_means(suite: Part) -> None:
    axes = figure(suite, "value").axes[0]
    features, hybrid = (line for line in axes.lines if len(line.get_xdata()) == 4)  # type: ignore[arg-type]
    # Levels of .6, .63, .66 and .69 and a hundredth by seed, plus a thirtieth: the mean of .2, 0 and −.1.
    means = [level + 0.01 + 0.1 / 3 for level in (0.6, 0.63, 0.66, 0.69)]
    assert list(features.get_ydata()) == pytest.approx(means)  # type: ignore[arg-type]
    assert list(hybrid.get_ydata()) == pytest.approx([mean - 0.05 for mean in means])  # type: ignore[arg-type]


def test_matrices_are_means_over_seeds_of_at_most_sixteen_groups(tmp_path: Path) -> None:
    matrices = [[[0.9], [0.5, 0.7]], [[0.7], [0.1, 0.3]]]
    part = only(tmp_path / "a", *(result(seed=n, curve=[0.8, 0.5], accuracy_matrix=m) for n, m in enumerate(matrices)))
    cells = figure(part, "matrix").axes[0].collections[0].get_array()
    assert cells is not None and list(cells.compressed()) == pytest.approx([0.8, 0.3, 0.5])
    many = only(tmp_path / "b", *(result("lwf", settings={"width": width}) for width in range(18)))
    assert len([axes for axes in figure(many, "matrix").axes if axes.get_title(loc="left")]) == 16


def test_a_phase_that_a_run_did_not_have_took_no_time(tmp_path: Path) -> None:
    runs = [result(seed=0, seconds={"train": 240.0, "adapt": 120.0}), result(seed=1, seconds={"train": 360.0})]
    (axes,) = figure(only(tmp_path, *runs), "time").axes
    assert [bar.get_width() for bar in axes.patches] == [5.0, 1.0]  # type: ignore[attr-defined]


def test_a_hundred_tasks_can_be_drawn(tmp_path: Path) -> None:
    part = only(tmp_path, result("features", curve=[1 - task / 200 for task in range(100)]))
    drawn = next(plot for plot in part.plots if plot.name == "matrix").inline_svg("m")
    assert len(drawn) < 60_000 and "data:image/png" in drawn


def test_labels_are_shortened_to_the_room_there_is_and_stay_apart() -> None:
    assert fit(["short"], 200) == ["short"]
    with drawing():
        for words in ("W" * 500, "i" * 500, "🦜" * 50, "a quite ordinary name that is too long for its place"):
            (short,) = fit([words], 90, 10)
            assert "…" in short and text_width(short, 10) <= 90
    same = fit(["x" * 90 + "a" + "y" * 90, "x" * 90 + "b" + "y" * 90], 90, 10)
    assert len(set(same)) == 2 and all(text_width(each, 10) <= 90 for each in same)


def test_a_users_settings_of_matplotlib_change_nothing_and_stay(tmp_path: Path) -> None:
    before = only(tmp_path, result()).plots[0].inline_svg("a")
    with matplotlib.rc_context({"font.size": 33, "axes.facecolor": "red", "text.usetex": False}):
        assert only(tmp_path, result()).plots[0].inline_svg("a") == before
        assert matplotlib.rcParams["font.size"] == 33
    assert matplotlib.rcParams["text.parse_math"] is True


def test_files_are_made_for_a_papers_column(tmp_path: Path) -> None:
    plot = only(tmp_path, result("features"), result("lwf")).plots[0]
    made = {kind: plot.save(kind) for kind in ("svg", "pdf", "png")}
    assert made == {kind: plot.save(kind) for kind in made}
    photo = Image.open(io.BytesIO(made["png"]))
    assert photo.width == pytest.approx(WIDTH / 72 * 300, abs=2)
    assert photo.info["dpi"] == pytest.approx((300, 300), abs=0.1)
    assert b"/FontFile2" in made["pdf"] and b"CreationDate" not in made["pdf"]
    svg = ElementTree.fromstring(made["svg"])
    assert not list(svg.iter("{http://www.w3.org/2000/svg}text"))  # letters are outlines: no font is needed
    assert float(svg.attrib["width"].removesuffix("pt")) == pytest.approx(WIDTH)


def test_every_figure_and_table_is_written(tmp_path: Path) -> None:
    runs = [result("features", curve=[0.9]), result("lwf", curve=[0.8])]
    written = make_report([save(tmp_path / "runs", *runs)]).save_figures(tmp_path / "figures")
    assert sorted(written) == sorted((tmp_path / "figures").iterdir())
    names = {re.sub("made-1-task-of-2-classes-", "", path.name) for path in written}
    assert {"accuracy.svg", "accuracy.pdf", "accuracy.png", "memory.pdf", "time.svg"} <= names
    assert {
        "results.tex",
        "results.csv",
        "tasks.csv",
        "settings.tex",
        "common-settings.csv",
        "environment.csv",
    } <= names


# Styles of groups.


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", [*HUES, INK, MUTED])
def test_colours_can_be_seen_on_light_and_dark_pages(colour: str) -> None:
    least = 3 if colour in HUES else 4.5
    assert contrast(colour, PAGE) >= least and contrast(COLOURS[colour], COLOURS[PAGE]) >= least


def looks(part: Part) -> dict[str, str]:
    return {label: str(sorted(style.items())) for label, style in part.styles.items()}


def test_every_method_has_a_style_of_its_own_on_every_page(tmp_path: Path) -> None:
    assert set(REAL_METHODS) <= {*METHODS, *ABLATIONS} and set(MADE) <= {*METHODS, *ABLATIONS}
    together = looks(only(tmp_path / "all", *(result(method) for method in [*METHODS, *ABLATIONS])))
    assert len(set(together.values())) == len(together)
    assert looks(only(tmp_path / "one", result("lwf"), result("another")))["lwf"] == together["lwf"]


def test_groups_of_one_method_have_hues_that_no_other_method_has(tmp_path: Path) -> None:
    variants = [result("lucir", settings={"width": width}) for width in range(7)]
    part = only(tmp_path, *variants, result("features"), result("joint"))
    hues = {label: style["color"] for label, style in part.styles.items()}
    assert len(set(looks(part).values())) == 9
    others = {hues.pop("features"), hues.pop("joint")}
    assert len(set(hues.values())) == 7 and not others & set(hues.values())


def test_any_number_of_groups_have_different_styles(tmp_path: Path) -> None:
    runs = [result(f"method {number}", settings={"width": width}) for number in range(15) for width in range(3)]
    assert len(set(looks(only(tmp_path, *runs)).values())) == 45
