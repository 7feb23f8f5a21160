"""Numbers and names as text: for a page, for LaTeX and for CSV."""

from __future__ import annotations

import re
from collections.abc import Sequence

MINUS = "\N{MINUS SIGN}"


def accuracy(value: float) -> str:
    """Three digits without the zero: .458."""
    digits = f"{abs(value):.3f}"
    sign = MINUS if value < 0 and float(digits) else ""
    return sign + digits.removeprefix("0")


def megabytes(count: float) -> str:
    """Bytes in MB of 2^20: 6.10, 48.8, and 0 for nothing."""
    value = count / 2**20
    if value >= 9.995 or not value:
        return f"{value:,.1f}" if value else "0"
    return f"{value:.2f}" if value >= 0.095 else f"{value:.2g}"


def seconds(value: float) -> str:
    """Seconds: 0.8, 14.2, 1,135."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def times(ratio: float) -> str:
    """A ratio: 1.4, 12."""
    return f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.1f}"


def integers(numbers: Sequence[int]) -> str:
    """Integers in order, runs of them drawn together: 0–4, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; with semicolons where a word has commas of its own."""
    comma, last = ("; ", "; and ") if any(", " in word for word in words) else (", ", " and ")
    return last.join([comma.join(words[:-1]), words[-1]] if len(words) > 1 else words)


# They set a name apart from the text around it, whichever way it is written. No name holds them: see reading.clean.
OPENING, CLOSING = "\N{FIRST STRONG ISOLATE}", "\N{POP DIRECTIONAL ISOLATE}"


def named(label: str) -> str:
    """A name within a sentence, marked as such."""
    return f"{OPENING}{label}{CLOSING}"


def unmarked(sentence: str) -> str:
    """The sentence without the marks around names."""
    return sentence.replace(OPENING, "").replace(CLOSING, "")


LATEX = {
    **{"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}"},
    **{"|": r"\textbar{}", '"': "{''}"},
    **{"±": r"$\pm$", MINUS: "$-$", "–": "--", "…": r"\dots{}", "×": r"$\times$"},
    **{"α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "λ": r"$\lambda$", "ω": r"$\omega$"},
}


def latex(text: str) -> str:
    """The text for LaTeX, where nothing in it is a command."""
    return "".join(LATEX.get(each, each) for each in re.sub(r"\s+", " ", text))
