"""Sphinx's configuration of the site: `make docs` builds it into site/."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import generate  # noqa: E402

import engram  # noqa: E402

project = "engram"
author = "The engram authors"
copyright = "The engram authors"
version = release = engram.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_static"]
myst_enable_extensions = ["colon_fence", "attrs_inline", "attrs_block"]
myst_heading_anchors = 4  # links to headings, as GitHub writes them
suppress_warnings = ["myst.header", "misc.highlighting_failure"]  # pages that are read on their own may skip a level
copybutton_exclude = ".linenos, .gp, .go"  # prompts and output are not copied
copybutton_only_copy_prompt_lines = True
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

napoleon_google_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "separated"
default_role = "literal"  # docstrings quote code in single backticks
python_maximum_signature_line_length = 88

html_theme = "pydata_sphinx_theme"
html_title = "engram"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "engram"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 7,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "use_edit_page_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": [], "concepts": []}


def escape(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text: a star is a star, and an underscore ends a name."""
    lines[:] = [re.sub(r"(?<!`)\*(?=\w)|(?<=\w)_(?=,)", r"\\\g<0>", line) for line in lines]


def setup(app: object) -> None:
    """Write the generated pages before Sphinx looks for sources, and lead links out of docs/ to where they belong."""
    generate.pages(HERE / "generated")
    app.connect("source-read", generate.relink)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", escape)  # type: ignore[attr-defined]
