"""Sphinx builds the documentation as HTML: ``./bootstrap docs``. Only the reference is made of anything but files."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

import reference
from pygments.lexers.special import TextLexer

import nsbox

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "nsbox"
version = release = nsbox.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "alabaster"
html_theme_options = {"description": "Untrusted code in a throw-away sandbox", "page_width": "1100px"}
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True


def _fill(app: "Sphinx", name: str, source: list[str]) -> None:
    if name == "reference":
        source[0] = source[0].replace(reference.MARK, reference.text())
    here = Path(app.srcdir, name).parent

    def outside(link: re.Match[str]) -> str:
        """What lies outside of docs/ is no page, but can come along as a file."""
        target = (here / link[2]).resolve()
        if target.is_dir():
            return link[1]
        inside = target.is_relative_to(Path(app.srcdir).resolve())
        return link[0] if inside else f"{{download}}`{link[1]} <{link[2]}>`"

    source[0] = re.sub(r"\[([^]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)", outside, source[0])


def _plain(_app: "Sphinx", _what: str, _name: str, _thing: object, _options: object, lines: list[str]) -> None:
    """What collections.namedtuple says about a field is nothing to read."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def _signature(
    _app: "Sphinx", what: str, name: str, thing: object, _options: object, _text: str, _returns: str
) -> tuple[str, str] | None:
    """Of a class that nobody but nsbox makes, and of one that is made by ``nsbox.frozen``, which has fields."""
    if what == "class" and (name in reference.ALSO or name == "nsbox.Result"):
        return "", ""
    if what == "class" and getattr(getattr(thing, "__init__", None), "__module__", "") == "nsbox.frozen":
        return f"({reference.fields(thing)})", ""
    return None


def setup(app: "Sphinx") -> None:
    """Called by Sphinx."""
    app.add_lexer("mermaid", TextLexer)  # shown as it is written
    app.connect("source-read", _fill)
    app.connect("autodoc-process-docstring", _plain)
    app.connect("autodoc-process-signature", _signature)
