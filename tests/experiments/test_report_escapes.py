"""Names may be anything: no output lets one of them become a tag, a command, a formula or a colour."""

import csv
import io
import json
import re
import warnings
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from made_results import result, save, save_suite

from engram.experiments.report import Report, make_report
from engram.experiments.report.tables import Table, latex
from engram.text import csv_text, printable

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "$\\frac{1}{",
    "$x$ and $y$",
    '=HYPERLINK("http://evil","x")',
    "+1+1",
    "-2+3",
    "@SUM(A1)",
    "\tcmd|' /C calc'!A0",
    "[red]bold[/red]",
    "\\input{/etc/passwd}",
    "%&#_{}~^",
    "{{ 7 * 7 }} {% raw %}",
    "</svg><svg onload=alert(1)>",
    "</style><style>*{display:none}",
    "_hidden",
    "משהו بالعربية",
    "🦜👩‍👩‍👧‍👦 emoji",
    "\x1b[31mred\x1b[0m",
    "\u202egnirts desrever",
    "nul\x00 and \ud800 lone",
    "../../../../etc/passwd",
    "very long " * 200,
    "",
]
# What a page is made of, whatever the names are.
ALLOWED = {
    *{"html", "head", "meta", "title", "style", "body", "a", "header", "nav", "main", "section", "div", "span"},
    *{"h1", "h2", "h3", "p", "ul", "li", "b", "bdi", "strong", "sup", "pre", "code", "details", "summary"},
    *{"table", "caption", "thead", "tbody", "tr", "th", "td", "figure", "figcaption"},
    *{"svg", "desc", "defs", "g", "path", "use", "text", "tspan", "clippath", "image", "rect"},
}


def table(cells: dict[str, list[str | None]], rows: list[str], caption: str = "") -> Table:
    frame = pd.DataFrame(cells, index=rows, dtype=object)
    return Table(caption, frame, frame)


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A report in which every kind of name is hostile: methods, data, settings, phases, environment, files, suites."""
    folder = tmp_path_factory.mktemp("hostile")
    runs = [
        result(
            name,
            0,
            dataset=HOSTILE[0],
            class_order=HOSTILE[:6],
            settings={name: name, "list": [name]},
            seconds={"train": 2.0, name: 1.0},
            environment={name: name},
        )
        for name in HOSTILE
    ]
    save(folder / "runs", *runs)
    bad = folder / "<b>bad & \\input" / "result.json"
    bad.parent.mkdir()
    bad.write_text("{")
    suite = save_suite(folder / "suite", [0, 1, 100])
    described = json.loads((suite / "suite.json").read_text())
    for place, variant in enumerate(described["variants"]):
        variant["label"], variant["series"] = HOSTILE[place], HOSTILE[place + 6]
    described |= {"suite": HOSTILE[1], "summary": HOSTILE[0], "finding": HOSTILE[1], "varies": HOSTILE[2]}
    described["command"] = HOSTILE[13]
    (suite / "suite.json").write_text(json.dumps(described))
    return make_report([folder])


@pytest.fixture(scope="module")
def page(everywhere: Report) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return everywhere.html()


def test_no_name_becomes_a_tag_or_an_attribute(page: str) -> None:
    tags = Tags(page)
    assert tags.names <= ALLOWED
    assert not {name for name in tags.attributes if name.startswith("on") or name == "src"}
    assert "<script" not in page and "<img" not in page and page.count("</style>") == 1
    assert "{{" in "".join(tags.words)  # the name itself, not what a template would make of it
    assert "49" not in "".join(word for word in tags.words if "raw" in word)


def test_names_are_shown_as_they_are(page: str) -> None:
    words = "\n".join(Tags(page).words)
    for name in (
        "<script>alert(1)</script>",
        "$\\frac{1}{",
        "[red]bold[/red]",
        "\\input{/etc/passwd}",
        "🦜",
        "_hidden",
    ):
        assert name in words


def test_no_mathematics_is_made_of_a_name(page: str) -> None:
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    assert "$x$ and $y$" in texts and "$\\frac{1}{" in texts


def test_drawings_are_whole_xml(page: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) > 8
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_the_page_can_be_written_whatever_is_in_a_name(page: str) -> None:
    page.encode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", page)


def test_a_damaged_file_is_named_and_its_name_escaped(everywhere: Report, page: str) -> None:
    assert any("<b>bad & \\input" in note for note in everywhere.notes)
    assert "&lt;b&gt;bad &amp; \\input" in page


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_no_name_is_a_command_of_latex(name: str) -> None:
    written = table({name: [name]}, [name], caption=name).latex
    assert written.count("\n") == 8  # the comment stays one line
    own = r"\\(textbackslash|textasciitilde|textasciicircum|textless|textgreater|textbar|dots|[{}$&#%_])"
    known = r"\\(begin|end|toprule|midrule|bottomrule|\\)"
    assert not re.search(r"\\", re.sub(f"{own}|{known}", "", written))
    for line in written.splitlines()[1:]:
        assert "%" not in line.replace(r"\%", "")
        assert line.replace(r"\$", "").count("$") % 2 == 0


@pytest.mark.parametrize("name", ["[2cm]", " [2cm]", "*"])
def test_the_end_of_a_row_takes_nothing_of_the_next(name: str) -> None:
    *_, row, _, _ = table({"x": ["", ""]}, ["first", name]).latex.splitlines()
    assert row.lstrip().startswith("{")


def test_latex_writes_specials_as_text() -> None:
    assert latex("\\input{a_b}") == r"\textbackslash{}input\{a\_b\}"
    assert latex("50 % & α = #1~^") == r"50 \% \& $\alpha$ = \#1\textasciitilde{}\textasciicircum{}"


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_no_cell_is_a_formula(name: str) -> None:
    written = table({name: [printable(name), None]}, [name, printable(name)]).csv
    for row in csv.reader(io.StringIO(written)):
        assert not [cell for cell in row if cell[:1] in {"=", "+", "-", "@", "\t", "\r"}]


def test_numbers_stay_numbers_in_csv(tmp_path: Path) -> None:
    (part,) = make_report([save(tmp_path, result("features", forgetting=-0.25))]).parts
    rows = list(csv.reader(io.StringIO(part.tables["results"].csv)))
    assert float(rows[1][rows[0].index("forgetting")]) == -0.25
    assert csv_text("-0.25") == "'-0.25" and csv_text("plain") == "plain"


def test_files_are_named_after_no_one(tmp_path: Path) -> None:
    runs = [result(name, dataset="../../x/$y", curve=[0.5], seconds={}) for name in HOSTILE[:4]]
    files = make_report([save(tmp_path / "runs", *runs)]).save_figures(tmp_path / "figures")
    assert all(re.fullmatch(r"[a-z0-9-]+\.(svg|pdf|png|tex|csv)", file.name) for file in files)
    assert {file.parent for file in files} == {tmp_path / "figures"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures", "runs"]
    for file in (tmp_path / "figures").glob("*.svg"):
        ElementTree.parse(file)
