"""The figures: which there are, where things lie in them, and the files they become."""

import io
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import pytest
from made_results import every_method, result, save, save_suite
from matplotlib.figure import Figure
from PIL import Image

from engram.experiments.report import make_report
from engram.experiments.report.drawing import COLUMN, PAGE, drawing, fitted, fitted_all, log_scale, text_width
from engram.experiments.report.page import Part, Report
from engram.experiments.report.plot import Plot
from engram.experiments.report.rendering import files, page_svg


def only(report: Report) -> Part:
    (part,) = report.parts
    return part


def plot_of(part: Part, name: str) -> Plot:
    return next(plot for plot in part.plots if plot.name == name)


def draw(plot: Plot) -> Figure:
    with drawing(PAGE):
        figure = plot.draw(PAGE)
        figure.draw_without_rendering()
    return figure


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Part:
    return only(make_report([save_suite(tmp_path_factory.mktemp("suite"), [0, 0.1, 10, 1000])]))


def test_there_is_a_figure_for_everything_that_was_measured(tmp_path: Path, suite: Part) -> None:
    def names(*runs: object) -> list[str]:
        made = make_report([save(tmp_path / str(len(list(tmp_path.iterdir()))), *runs)])  # type: ignore[arg-type]
        return [plot.name for plot in only(made).plots]

    assert names(result("features"), result("lwf")) == ["accuracy", "memory", "drift", "matrix", "forgetting", "time"]
    assert names(result("lwf"), result("finetune")) == ["accuracy", "matrix", "forgetting", "time"]
    assert names(result("lwf", curve=[0.5], seconds={})) == ["accuracy"]
    assert [plot.name for plot in suite.plots][:3] == ["accuracy", "value", "memory"]


def test_curves_are_drawn_where_the_means_are(tmp_path: Path) -> None:
    runs = [result("features", seed, [0.9, 0.6 + 0.1 * seed, 0.5]) for seed in (0, 1)]
    figure = draw(plot_of(only(make_report([save(tmp_path, *runs)])), "accuracy"))
    (axes,) = figure.axes
    (line,) = axes.lines
    assert [list(map(float, values)) for values in line.get_data()] == [[2, 4, 6], pytest.approx([0.9, 0.65, 0.5])]
    (band,) = axes.collections
    lower = sorted(point[1] for point in band.get_paths()[0].vertices if point[0] == 4)  # type: ignore[index,union-attr]
    deviation = math.sqrt(0.005)
    assert (lower[0], lower[-1]) == pytest.approx((0.65 - deviation, 0.65 + deviation))


def test_an_axis_that_does_not_begin_at_zero_says_so(tmp_path: Path) -> None:
    high = plot_of(only(make_report([save(tmp_path / "high", result(curve=[0.98, 0.96, 0.92]))])), "accuracy")
    assert draw(high).axes[0].get_ylim()[0] == pytest.approx(0.8) and "does not begin at 0" in high.caption
    low = plot_of(only(make_report([save(tmp_path / "low", result(curve=[0.98, 0.96, 0.2]))])), "accuracy")
    assert draw(low).axes[0].get_ylim()[0] == 0 and "does not begin at 0" not in low.caption


def test_one_seed_has_no_band(tmp_path: Path) -> None:
    figure = draw(plot_of(only(make_report([save(tmp_path, result())])), "accuracy"))
    assert not figure.axes[0].collections


def test_what_keeps_nothing_lies_at_the_left_edge(tmp_path: Path) -> None:
    plot = plot_of(only(make_report([save(tmp_path, *every_method(tasks=2, seeds=1))])), "memory")
    figure = draw(plot)
    labels = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert labels[0] == "nothing" and "left edge" in plot.caption
    places = [float(line.get_xdata()[0]) for line in figure.axes[0].lines if len(line.get_xdata()) == 1]  # type: ignore[arg-type,index]
    assert min(places) < math.log10(5.86) - 0.3 and max(places) == pytest.approx(math.log10(146.5), abs=1e-3)


def test_values_that_span_more_than_fifty_times_are_on_a_logarithmic_axis(suite: Part, tmp_path: Path) -> None:
    figure = draw(plot_of(suite, "value"))
    assert len(figure.axes) == 2  # accuracy, and ω
    ticks = figure.axes[-1].get_xticks()
    assert list(ticks[1:]) == pytest.approx([-1, 1, 3]) and ticks[0] < -1.4
    assert [tick.get_text() for tick in figure.axes[-1].get_xticklabels()] == ["0", ".1", "10", "1,000"]
    linear = draw(plot_of(only(make_report([save_suite(tmp_path, [1, 2, 4])])), "value"))
    assert list(linear.axes[-1].get_xticks()) == [1, 2, 4]


def test_a_scale_puts_equal_ratios_at_equal_distances() -> None:
    scale = log_scale([0, 1, 10, 100], at_values=True)
    assert scale.place(100) - scale.place(10) == pytest.approx(scale.place(10) - scale.place(1))
    assert scale.edge is not None and scale.place(0) == scale.edge < scale.place(1)


def test_no_more_than_sixteen_matrices_are_drawn(tmp_path: Path) -> None:
    runs = [result("lwf", settings={"learning_rate": learning_rate}) for learning_rate in range(18)]
    plot = plot_of(only(make_report([save(tmp_path, *runs)])), "matrix")
    maps = [axes for axes in draw(plot).axes if axes.get_title(loc="left")]
    assert len(maps) == 16 and "The first 16 of 18 groups." in plot.caption


def test_a_hundred_tasks_can_be_drawn(tmp_path: Path) -> None:
    part = only(make_report([save(tmp_path, result("features", curve=[1 - task / 200 for task in range(100)]))]))
    drawn = page_svg(plot_of(part, "matrix"), "m", {})
    assert len(drawn) < 60_000 and "data:image/png" in drawn
    assert len(plot_of(part, "matrix").table.rows) == 1


def test_labels_are_fitted_to_the_room_there_is_and_stay_apart() -> None:
    with drawing(PAGE):
        assert fitted("short", 200, 10) == "short"
        for words in ("W" * 500, "i" * 500, "🦜" * 50, "a quite ordinary name that is too long for its place"):
            short = fitted(words, 90, 10)
            assert "…" in short and text_width(short, 10) <= 90
        same = fitted_all(["x" * 90 + "a" + "y" * 90, "x" * 90 + "b" + "y" * 90], 90, 10)
    assert len(set(same)) == 2


def test_users_own_settings_of_matplotlib_change_nothing_and_stay(tmp_path: Path) -> None:
    plot = plot_of(only(make_report([save(tmp_path, result())])), "accuracy")
    before = page_svg(plot, "a", {})
    with matplotlib.rc_context({"font.size": 33, "axes.facecolor": "red", "text.usetex": False}):
        assert page_svg(plot, "a", {}) == before
        assert matplotlib.rcParams["font.size"] == 33
    assert matplotlib.rcParams["text.parse_math"] is True


def test_files_are_made_for_a_papers_column(tmp_path: Path) -> None:
    plot = plot_of(only(make_report([save(tmp_path, result("features"), result("lwf"))])), "accuracy")
    made = files(plot)
    assert set(made) == {"svg", "pdf", "png"} and files(plot) == made
    picture = Image.open(io.BytesIO(made["png"]))
    assert picture.width == pytest.approx(COLUMN.width / 72 * 300, abs=2)
    assert picture.info["dpi"] == pytest.approx((300, 300), abs=0.1)
    assert b"/FontFile2" in made["pdf"] and b"CreationDate" not in made["pdf"]
    drawing_ = ElementTree.fromstring(made["svg"])
    assert not list(drawing_.iter("{http://www.w3.org/2000/svg}text"))  # letters are outlines: no font is needed
    assert float(drawing_.attrib["width"].removesuffix("pt")) == pytest.approx(COLUMN.width)


def test_every_figure_and_table_is_written(tmp_path: Path) -> None:
    runs = [result("features", curve=[0.9]), result("lwf", curve=[0.8])]
    written = make_report([save(tmp_path / "runs", *runs)]).save_figures(tmp_path / "figures")
    assert sorted(written) == sorted((tmp_path / "figures").iterdir())
    names = {re.sub("made-1-task-of-2-classes-", "", path.name) for path in written}
    assert {"accuracy.svg", "accuracy.pdf", "accuracy.png", "accuracy.tex", "accuracy.csv"} <= names
    assert {"results.tex", "results.csv", "settings.tex", "common-settings.csv", "environment.csv"} <= names
