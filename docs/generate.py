"""Pages of the site that are made when it is built: commands, settings, and documents from outside docs/.

Links of all pages are rewritten, so that a document reads the same on the site and in the repository.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

# Documents that are pages of the site too, by the name of the page.
ELSEWHERE = {
    "results": ROOT / "RESULTS.md",
    "speed": ROOT / "benchmarks" / "RESULTS.md",
    "contributing": ROOT / "CONTRIBUTING.md",
    "security": ROOT / "SECURITY.md",
    "changelog": ROOT / "CHANGELOG.md",
}


def pages(folder: Path) -> None:
    """Write all generated pages, and those that are unchanged not again."""
    folder.mkdir(exist_ok=True)
    texts = {name: path.read_text(encoding="utf-8") for name, path in ELSEWHERE.items()}
    texts |= {"commands": commands(), "settings": settings()}
    for name, text in texts.items():
        page = folder / f"{name}.md"
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def relink(app: object, page: str, source: list[str]) -> None:
    """Rewrite the links of a page: to pages of the site, to files as downloads, and folders as plain text."""
    name = page.removeprefix("generated/")
    written = ELSEWHERE[name] if page.startswith("generated/") and name in ELSEWHERE else ROOT / "docs" / f"{page}.md"
    here = (ROOT / "docs" / page).parent

    def rewritten(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, hash_sign, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        found = (written.parent / path).resolve()
        if found.is_dir():
            return text
        for other, document in ELSEWHERE.items():
            if found == document:
                found = ROOT / "docs" / "generated" / f"{other}.md"
        return f"[{text}]({os.path.relpath(found, here)}{hash_sign}{anchor})"

    parts = re.split(r"(^```.*?^```$)", source[0], flags=re.MULTILINE | re.DOTALL)  # code is every second part
    parts[::2] = [re.sub(r"\[((?:[^][]|\[[^][]*\])*)\]\(([^()\s]+)\)", rewritten, part) for part in parts[::2]]
    source[0] = "".join(parts)


def commands() -> str:
    """The page of the command line, from the commands themselves."""
    from typer.main import get_command

    from engram.cli.app import app

    group: Any = get_command(app)
    lines = [
        "# Command line",
        "",
        "Progress goes to stderr and results to stdout. The exit code is 0 for success, 1 for failure, 2 for wrong",
        "usage and 130 after Ctrl-C. `python -m engram` is the same program. This page is made from",
        "the program; `engram COMMAND --help` prints the same.",
    ]
    for name, command in group.commands.items():
        context: Any = command.make_context(name, [], resilient_parsing=True)
        context.info_name = f"engram {name}"
        lines += ["", f"## engram {name}", "", inspect.cleandoc(command.help or ""), "", "```text"]
        lines += [" ".join([context.info_name, *command.collect_usage_pieces(context)]), "```", ""]
        rows = [record for each in command.params if (record := _parameter(each, context))]
        lines += table(("option", "meaning"), rows)
    return "\n".join(lines) + "\n"


def _parameter(parameter: Any, context: Any) -> tuple[str, str] | None:
    record = parameter.get_help_record(context)
    if record is None or "--help" in record[0]:
        return None
    return f"`{record[0]}`", record[1]


def settings() -> str:
    """The page of the methods and their settings, from METHODS."""
    from engram.methods import METHODS, OBJECTIVES, make
    from engram.settings import fields

    lines = [
        "# Methods and settings",
        "",
        "A setting is given as `--set key=value` on the command line, as `key=value` to `engram.make`, or in",
        "`Plan(settings={…})`. This page is made from the code. The defaults here are those of the method;",
        "a preset may change them ([Presets](../research.md#presets)), and `result.json` records the values of a run.",
        "",
        "## Methods",
        "",
    ]
    found: dict[str, tuple[type, dataclasses.Field[Any], set[str]]] = {}  # where declared, and the methods that have it
    for name, method in METHODS.items():
        for setting, field, owner in fields(method.learner, {"objective": OBJECTIVES[method.objective]}):
            found.setdefault(setting, (_declaring(owner, field.name), field, set()))[2].add(name)
    defaults = {setting: _default(field) for setting, (_, field, _) in found.items()}

    for name, method in METHODS.items():
        own = {key: _value(value) for key, value in make(name).settings().items()}
        differing = ", ".join(f"`{key}={value}`" for key, value in own.items() if defaults.get(key, value) != value)
        lines += [f"### {name}", "", f"{method.summary[0].upper()}{method.summary[1:]}.", ""]
        lines += [f"- stores: {method.keeps}", f"- objective: `{method.objective}`"]
        lines += [f"- settings that differ from the defaults below: {differing or 'none'}", ""]

    lines += ["## Settings", ""]
    for group in dict.fromkeys(declaring for declaring, _, _ in found.values()):
        members = {name: each[1:] for name, each in found.items() if each[0] is group}
        users = set().union(*(users for _, users in members.values()))
        having = "all" if users == set(METHODS) else ", ".join(name for name in METHODS if name in users)
        lines += [f"### {group.__name__}", "", _first_line(group), "", f"Methods: {having}.", ""]
        comments = _comments(group)
        rows = [(f"`{name}`", f"`{defaults[name]}`", comments.get(each[0].name, "")) for name, each in members.items()]
        lines += [*table(("setting", "default", "meaning"), rows), ""]
    return "\n".join(lines) + "\n"


def _first_line(owner: type) -> str:
    return inspect.cleandoc(owner.__doc__ or "").splitlines()[0]


def _declaring(owner: type, field: str) -> type:
    """The class that declares a field, where others inherit it."""
    return next(each for each in reversed(owner.__mro__) if field in inspect.get_annotations(each))


def _default(field: dataclasses.Field[Any]) -> str:
    if "registry" in field.metadata:
        return str(field.metadata["default"])
    if field.default is not dataclasses.MISSING:
        return _value(field.default)
    return _value(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "required"


def _value(value: object) -> str:
    """A value as --set takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(_value, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _comments(owner: type) -> dict[str, str]:
    """What the source says of each field: the comment behind it, or else the one above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in textwrap.dedent(inspect.getsource(owner)).splitlines():
        if match := re.match(r" {4}(\w+): [^#]*?(?: # (.*))?$", line):
            found[match[1]] = match[2] or " ".join(above)
        above = [*above, line.strip(" #")] if re.match(r" {4}# ", line) else []
    return found


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A table in Markdown."""
    head = tuple(head)
    for row in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(str(cell).replace("\n", " ").replace("|", r"\|") for cell in row) + " |"
