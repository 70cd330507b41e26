"""The API reference holds every public name, and its docstrings tell what one needs: parameters, units, errors."""

import ast
import importlib.util
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nsbox
from nsbox.spec import FIELDS

PAGE = Path(__file__).resolve().parents[2] / "docs/reference.py"
SPEC = importlib.util.spec_from_file_location("reference", PAGE)
assert SPEC is not None
assert SPEC.loader is not None
reference: ModuleType = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)

# Annotations that need no entry of ours.
KNOWN = {"Any", "AsyncIterator", "Callable", "Future", "Iterator", "Names", "None", "Self"}
ALIASES = {"Skips": "Skipped", "Entries": "Entry", "Matches": "Match"}
UNITS = {"timeout": "second", "ttl": "second", "max_bytes": "byte", "max_output": "byte", "size": "byte"}


def calls() -> dict[str, tuple[Any, str]]:
    """Dotted name → (function, docstring of what it is in) of everything that can be called or looked up."""
    found = {}
    for name in reference.names():
        thing = reference.resolve(name)
        around = inspect.getdoc(thing) or ""
        for member, value in reference.members(name).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if inspect.isfunction(function):
                found[f"{name}.{member}"] = (function, around)
        if inspect.isfunction(thing):
            found[name] = (thing, "")
    return found


CALLS = calls()


def test_every_public_name_is_in_it() -> None:
    text = reference.text()
    for name in nsbox.__all__:
        assert re.search(rf"^\.\. auto(class|function|module):: nsbox\.{name}$", text, re.M), name
    assert reference.MARK in PAGE.with_suffix(".md").read_text()


def test_every_option_is_in_it() -> None:
    text = reference.text()
    for name in FIELDS:
        assert f"| `{name}` |" in text


def test_what_is_given_back_is_in_it() -> None:
    documented = {name.rpartition(".")[2] for name in reference.names()}
    for name, (function, _) in CALLS.items():
        annotation = str(function.__annotations__.get("return", ""))
        for word in re.findall(r"\b[A-Z]\w+", annotation):
            assert ALIASES.get(word, word) in documented | KNOWN, f"{name} gives back {annotation}"


@pytest.mark.parametrize("name", reference.names())
def test_every_name_has_a_docstring(name: str) -> None:
    text = inspect.getdoc(reference.resolve(name)) or ""
    # A tuple has one of its own, which is no more than its fields.
    assert len(text.split()) >= 4, name
    assert not text.startswith(f"{name.rpartition('.')[2]}("), name


@pytest.mark.parametrize("name", CALLS)
def test_every_call_tells_what_one_has_to_know(name: str) -> None:
    function, around = CALLS[name]
    text = inspect.getdoc(function) or ""
    assert len(text.split()) >= 3, "no docstring"
    assert not text.startswith("See "), "sends the reader elsewhere"
    whole = f"{text} {around}"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls") or parameter.name.startswith("_"):
            continue
        # Named, or meant by a word of the sentence: "path" by "Paths are …".
        assert re.search(rf"\b{parameter.name}(s|es)?\b", whole, re.I), f"{parameter.name} is not told"
        unit = UNITS.get(parameter.name)
        assert unit is None or unit in whole, f"{parameter.name} has no unit"
    for error in raised(function):
        assert re.search(rf"\b{error}\b|[Rr]aises (what|as) ", text), f"{error} is not told"


def raised(function: Any) -> set[str]:
    """Names of the errors that a function itself raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = {node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None}
    return {node.func.id for node in found if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def test_every_name_is_in_it_once() -> None:
    names = reference.names()
    assert sorted(names) == sorted(set(names))
