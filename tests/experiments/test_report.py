"""The report: its tables, its commands, and the page it becomes."""

import ast
import base64
import csv
import io
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from made_results import every_method, result, save, save_suite
from scipy import stats

from engram.experiments import report as package
from engram.experiments.report import Part, Report, make_report
from engram.experiments.report.tables import accuracy, amount, commands, ranges
from engram.experiments.results import Result

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results"


def seeds(method: str, averages: list[float], first: int = 0, **values: object) -> list[Result]:
    return [result(method, first + place, [each, each], **values) for place, each in enumerate(averages)]


def only(folder: Path, *results: Result) -> Part:
    (part,) = make_report([save(folder, *results)]).parts
    return part


def marked(part: Part) -> set[tuple[str, str]]:
    text = part.tables["results"].text
    return {(text.index[row], text.columns[column]) for row, column in part.tables["results"].best}


# Tables.


def test_numbers_are_short() -> None:
    numbers = (0.4584, 1.0, -0.0123, -0.00001, 0.0)
    assert [accuracy(each) for each in numbers] == [".458", "1.000", "−.012", ".000", ".000"]
    amounts = (0, 6.1035, 48.83, 375, 3750, 0.2441, 0.004)
    assert [amount(each) for each in amounts] == ["0", "6.1", "48.8", "375", "3,750", "0.244", "0.004"]
    assert ranges([4, 0, 1, 2, 7, 8]) == "0–2, 4, 7–8"


def test_results_have_mean_deviation_interval_and_difference(tmp_path: Path) -> None:
    scores = {"features": [0.8, 0.7, 0.9], "lwf": [0.7, 0.65, 0.75]}
    part = only(tmp_path, *(run for method, each in scores.items() for run in seeds(method, each)))
    text = part.tables["results"].text
    # Student's t(.975, 2) is 4.3027: half widths .1 and .05 times 4.3027 / √3; differences −.1, −.05, −.15.
    assert text.loc["features", "average accuracy"] == ".800 ± .100 [.552, 1.048]"
    assert text.loc["lwf", "average accuracy"] == ".700 ± .050 [.576, .824]"
    assert list(text["difference to features"]) == ["–", "−.100 [−.224, .024]"]
    assert list(text["seeds"]) == ["0–2", "0–2"] and list(text["memory, MB"]) == ["12.2", "0"]


def test_the_best_values_are_marked_among_the_contenders(tmp_path: Path) -> None:
    runs = seeds("features", [0.8, 0.7]) + seeds("lwf", [0.6, 0.5], forgetting=0.1) + seeds("joint", [0.9, 0.9])
    assert marked(only(tmp_path, *runs)) == {
        ("features", "average accuracy"),
        ("features", "after the last task"),
        ("features", "drift gap"),
        ("lwf", "forgetting"),
        ("lwf", "memory, MB"),
    }


def test_the_best_of_each_measure_and_memory_is_compared_with_the_next_seed_by_seed(tmp_path: Path) -> None:
    runs = seeds("features", [0.8, 0.7, 0.9]) + seeds("icarl", [0.7, 0.65, 0.75], forgetting=0.1)
    runs += seeds("lwf", [0.6, 0.5, 0.55]) + seeds("eeil", [0.5, 0.5, 0.5]) + seeds("joint", [0.9, 0.9, 0.9])
    text = only(tmp_path, *runs).tables["leaders"].text.drop(columns="value").T.to_dict("list")
    lead = ".100 [−.024, .224]"  # differences .1, .05, .15
    assert text == {
        "average accuracy": ["features", "icarl", lead],
        "after the last task": ["features", "icarl", lead],
        "forgetting": ["icarl", "features", "−.150 [−.150, −.150]"],
        "average accuracy, at most 0 MB": ["lwf", "–", "–"],
        "average accuracy, at most 5.86 MB": ["icarl", "lwf", ".150 [.026, .274]"],
    }
    assert "leaders" not in only(tmp_path / "one", *seeds("features", [0.8]), *seeds("lwf", [0.6], first=1)).tables


def test_means_over_different_seeds_are_not_compared(tmp_path: Path) -> None:
    runs = seeds("features", [0.5, 0.5, 0.5]) + seeds("lwf", [0.4, 0.4, 0.4]) + seeds("icarl", [0.99], first=7)
    report = make_report([save(tmp_path, *runs)])
    assert marked(report.parts[0]) == set()
    assert list(report.parts[0].tables["results"].text["difference to features"]) == ["–", "–", "−.100 [−.100, −.100]"]
    warning = "Not all groups have the same seeds"
    assert warning in report.html()
    assert warning not in make_report([save(tmp_path / "same", *seeds("features", [0.5]))]).html()


def test_a_bound_with_other_seeds_does_not_keep_the_best_from_being_marked(tmp_path: Path) -> None:
    runs = seeds("features", [0.8, 0.7]) + seeds("lwf", [0.6, 0.5]) + seeds("joint", [0.9])
    part = only(tmp_path, *runs)
    assert ("features", "average accuracy") in marked(part)
    assert list(part.section.groups.index) == ["features", "lwf", "joint"]


def test_seconds_without_shared_training_are_starred(tmp_path: Path) -> None:
    runs = [result("features"), result("lwf", seconds={"measure": 1.0}), result("icarl", networks_reused=1)]
    text = only(tmp_path, *runs).tables["results"].text
    assert text["seconds"].to_dict() == {"features": "100", "lwf": "0*", "icarl": "100*"}


def test_seconds_after_training_and_the_drift_gap_are_among_the_results(tmp_path: Path) -> None:
    phases = {"train": 100.0, "fine-tune": 5.0, "measure": 9.0, "adapt": 3.0, "classify": 1.0}
    text = only(tmp_path, result("features", seconds=phases), result("lwf")).tables["results"].text
    assert list(text["after training"]) == ["4", "0"]
    assert list(text["drift gap"]) == [".020", "–"]
    assert "drift gap" not in only(tmp_path / "lwf", result("lwf")).tables["results"].text


def test_top_5_leads_on_imagenet(tmp_path: Path) -> None:
    runs = [result(seed=seed, dataset="imagenet100", curve_top5=[0.9, 0.8, 0.7]) for seed in (0, 1)]
    runs = [Result(**{**each.to_json(), "average_incremental_accuracy_top5": 0.8}) for each in runs]
    part = only(tmp_path, *runs)
    text = part.tables["results"].text
    assert list(text.columns)[:3] == ["average top-5 accuracy", "after the last task", "average accuracy"]
    assert text.iloc[0, 0].startswith(".800") and text.iloc[0, 1].startswith(".700")
    assert [plot.name for plot in part.plots][:2] == ["top-5-accuracy", "accuracy"]
    plots = {plot.name: plot for plot in part.plots}
    assert plots["matrix"].title == "Top-1 accuracy by task" and "top-1 accuracy" in plots["forgetting"].caption


def test_results_by_task_have_accuracy_and_drift(tmp_path: Path) -> None:
    part = only(tmp_path, *(result(seed=seed, curve=[0.9, 0.6 + 0.1 * seed, 0.5]) for seed in (0, 1)), result("lwf"))
    text = part.tables["tasks"].text
    assert list(text.columns) == ["2 classes", "4 classes", "6 classes"]
    assert text.loc["features: accuracy", "4 classes"] == ".650 ± .071"
    assert list(text.loc["features: ω, first task"]) == ["–", ".980", ".960"]
    assert [row for row in text.index if row.startswith("lwf")] == ["lwf: accuracy"]


def test_csv_has_numbers_in_full_and_latex_the_rules_of_booktabs(tmp_path: Path) -> None:
    table = only(tmp_path, *seeds("features", [0.8, 0.7]), *seeds("lwf", [0.6, 0.5])).tables["results"]
    rows = list(csv.DictReader(io.StringIO(table.csv)))
    assert float(rows[0]["average accuracy"]) == pytest.approx(0.75)
    assert float(rows[0]["average accuracy, std"]) == pytest.approx(np.std([0.8, 0.7], ddof=1))
    assert rows[0]["difference to features"] == "" and float(rows[1]["difference to features"]) == pytest.approx(-0.2)
    assert r"\toprule" in table.latex and r"\bottomrule" in table.latex
    assert r"features & \textbf{.750 $\pm$ .071 {[}.115, 1.385]} &" in table.latex
    assert r"lwf & .550 $\pm$ .071 {[}" in table.latex


def test_settings_are_split_into_those_that_differ_and_those_in_common(tmp_path: Path) -> None:
    other = result("lwf", settings={"seed": 3, "learning_rate": 0.2})
    tables = only(tmp_path, result("features"), other).tables
    assert tables["settings"].text.to_dict("index") == {"adapter": {"features": "mlp", "lwf": "–"}}
    assert tables["common-settings"].text.to_dict() == {"value": {"learning_rate": "0.2"}}


def test_an_environment_has_every_value_that_occurs(tmp_path: Path) -> None:
    runs = [result(seed=seed, environment={"torch": "2" if seed else "1", "device": "cpu"}) for seed in range(3)]
    environment = make_report([save(tmp_path, *runs)]).environment
    assert environment.text["value"].to_dict() == {"torch": "1; 2", "device": "cpu"}


# How to repeat it.


def test_commands_name_the_tasks_the_seeds_and_every_setting(tmp_path: Path) -> None:
    settings = {
        **{"network": "auto", "milestones": [0.5, 0.75], "weights": None, "flip": False, "device": "auto"},
        **{"objective": "lucir", "odd": "a b; rm -rf /"},
    }
    split = {"first_task": 4, "class_order": "1993", "validation": 0.1}
    runs = [
        result("lwf", seed, dataset="digits", split=split, settings={**settings, "seed": seed}) for seed in (0, 1, 5)
    ]
    first, second = commands(only(tmp_path, *runs).section, "lwf")
    assert first == (
        "engram run lwf --dataset digits --classes-per-task 2 --tasks 3 --first-task 4 --validation 0.1 "
        "--class-order 1993 --set network=auto --set milestones=0.5,0.75 --set weights=none --set flip=False "
        "--set objective=lucir --set 'odd=a b; rm -rf /' --seed 0 --seeds 2"
    )
    assert second.endswith("--seed 5")


def test_commands_load_the_data_as_they_were_loaded(tmp_path: Path) -> None:
    split = {"first_task": None, "class_order": "seed", "validation": 0.0, "data": "ab"}
    source = {"dataset": "folder", "data": "my images", "image_size": 64, "fit": "pad", "--odd": "x"}
    section = only(tmp_path, result(dataset="my images", split={**split, "source": source})).section
    (command,) = commands(section, "features")
    loading = "engram run features --dataset folder --data 'my images' --image-size 64 --fit pad --classes-per-task 2"
    assert command.startswith(loading) and "odd" not in command


@pytest.mark.parametrize("made", [{"split": {"data": "ab"}}, {"classes_per_task": None}, {"split": {"source": "x"}}])
def test_what_was_made_in_python_has_no_command(made: dict[str, object], tmp_path: Path) -> None:
    assert commands(only(tmp_path, result(**made)).section, "features") == []
    assert "no command repeats it" in make_report([tmp_path]).html()


# The page.


class Outline(HTMLParser):
    """Elements of a page, their attributes, and the headings' levels."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


@pytest.fixture(scope="module")
def committed() -> Report:
    return make_report([COMMITTED / "digits", COMMITTED / "suites-cifar100"])


@pytest.fixture(scope="module")
def page(committed: Report) -> str:
    return committed.html()


def test_the_page_reaches_for_nothing_outside_itself(page: str) -> None:
    assert not re.findall(r"https?://|//[a-z]+\.|@import|@font-face|javascript:", page)
    assert not re.findall(r"""url\((?!#)""", page)
    outline = Outline(page)
    assert not outline.all("script", "link", "iframe", "img", "object", "base", "form")
    assert not [value for _, attributes in outline.elements for name, value in attributes.items() if name == "src"]
    inside = ("#", "data:image/png;base64,", "data:text/csv;base64,", "data:text/plain;base64,")
    links = [attributes["href"] for _, attributes in outline.elements if "href" in attributes]
    assert links and all(link is not None and link.startswith(inside) for link in links)
    policy = next(each["content"] for each in outline.all("meta") if each.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_ids_are_unique_and_every_reference_finds_one(page: str) -> None:
    outline = Outline(page)
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page)
    assert {one or other for one, other in wanted} <= set(ids)
    for _, attributes in outline.elements:
        assert set((attributes.get("aria-labelledby") or "").split()) <= set(ids)


def test_headings_are_in_order_and_tables_have_scopes(page: str) -> None:
    outline = Outline(page)
    levels = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(each.get("scope") in ("row", "col") for each in outline.all("th"))
    assert outline.all("html")[0]["lang"] == "en" and len(outline.all("main")) == 1
    assert len(outline.all("caption")) == len(outline.all("table"))


def test_every_figure_has_a_name_and_a_caption(page: str) -> None:
    figures = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    assert len(figures) >= 15
    for figure in figures:
        assert re.search(r'<svg role="img" aria-label="[^"]+"', figure) and "<figcaption>" in figure


def test_every_colour_of_a_figure_follows_the_page(page: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    defined = set(re.findall(r"--c[0-9a-f]{6}(?=:)", page))
    assert set(re.findall(r"var\((--c[0-9a-f]{6})\)", drawings)) <= defined
    texts = re.findall(r"<text[^>]*>", drawings)
    assert texts and all("fill: var(--c" in each for each in texts)


def test_every_table_can_be_downloaded(committed: Report, page: str) -> None:
    links = {each["download"]: each["href"] for each in Outline(page).all("a") if "download" in each}
    part = committed.parts[0]
    content = links[f"{part.section.name}-results.csv"]
    assert content is not None
    assert base64.b64decode(content.partition(",")[2]).decode() == part.tables["results"].csv
    assert len(links) == 2 * page.count("<table>")


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    folder = save(tmp_path, *every_method(tasks=3, seeds=2)[:6])
    assert make_report([folder]).html() == make_report([folder]).html()


def test_a_suite_is_introduced_and_its_command_shown(tmp_path: Path) -> None:
    page = make_report([save_suite(tmp_path, [0.1, 100])]).html()
    assert "Accuracy and ω rise with α." in page and "engram suite alpha --dataset made" in page


def test_skipped_files_are_named_on_the_page(tmp_path: Path) -> None:
    save(tmp_path, result())
    (tmp_path / "result.json").write_text("{")
    assert str(tmp_path / "result.json") in make_report([tmp_path]).html()


def test_the_committed_results_are_as_numpy_and_scipy_have_them(committed: Report) -> None:
    scores = {
        name: [
            json.loads((COMMITTED / "digits" / name / f"seed-{seed}" / "result.json").read_text())[
                "average_incremental_accuracy"
            ]
            for seed in range(5)
        ]
        for name in ("hybrid", "features", "lwf")
    }
    part = next(part for part in committed.parts if part.section.title.startswith("digits"))
    text = part.tables["results"].text
    rows = {"hybrid": "hybrid", "features": "features, feature_distillation = 0.05", "lwf": "lwf"}
    for name, values in scores.items():
        shown = f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}".replace("0.", ".")
        assert text.loc[rows[name], "average accuracy"].startswith(shown)
    interval = stats.ttest_rel(scores["hybrid"], scores["features"]).confidence_interval(0.95)
    mean = np.mean(scores["hybrid"]) - np.mean(scores["features"])
    shown = f"−{mean:.3f} [−{interval.high:.3f}, −{interval.low:.3f}]".replace("0.", ".")
    assert text.loc[rows["features"], "difference to hybrid"] == shown


def test_json_has_the_numbers(tmp_path: Path) -> None:
    plain = make_report([save(tmp_path, *seeds("features", [0.8, 0.7]), *seeds("lwf", [0.6, 0.5]))]).to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    groups = plain["sections"][0]["groups"]
    assert list(groups) == ["features", "lwf"] and groups["features"]["seeds"] == [0, 1]
    assert groups["features"]["average accuracy"] == pytest.approx(0.75)
    assert groups["lwf"]["difference to features"] == pytest.approx(-0.2)


def test_the_report_imports_nothing_that_learns() -> None:
    """The rest of the room does; so this looks at the files of the report alone."""
    for file in Path(package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            heavy = ("torch", "sklearn", "engram.methods", "engram.network", "engram.features", "engram.data")
            assert not [name for name in names if name.startswith(heavy)], file
            assert "pyplot" not in " ".join(names), file
