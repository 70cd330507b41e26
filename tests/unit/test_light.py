"""The stand-ins behave as the originals do where they are used, and the way of `nsbox run` takes nothing else."""

import ast
import contextlib
import copy
import pickle
import subprocess
import sys
import threading
import typing
from pathlib import Path

import pytest

from nsbox import light


class Mine(light.NamedTuple):
    first: int
    second: str = "two"
    third: tuple[int, ...] = ()

    def twice(self) -> int:
        return 2 * self.first


class Theirs(typing.NamedTuple):
    first: int
    second: str = "two"
    third: tuple[int, ...] = ()


CALLS: list[tuple[tuple[object, ...], dict[str, object]]] = [
    ((1,), {}),
    ((1, "x"), {}),
    ((1, "x", (2,)), {}),
    ((), {"first": 1}),
    ((1,), {"third": (3,)}),
    ((), {}),
    ((1, "x", (), 4), {}),
    ((1,), {"first": 2}),
    ((1,), {"fourth": 2}),
]


@pytest.mark.parametrize(("args", "options"), CALLS)
def test_named_tuples_are_made_alike(args: tuple[object, ...], options: dict[str, object]) -> None:
    try:
        wanted = Theirs(*args, **options)  # type: ignore[arg-type]
    except TypeError:
        with pytest.raises(TypeError, match="Mine"):
            Mine(*args, **options)  # type: ignore[arg-type]
        return
    made = Mine(*args, **options)  # type: ignore[arg-type]
    assert tuple(made) == tuple(wanted)
    assert (made.first, made.second, made.third) == (wanted.first, wanted.second, wanted.third)
    assert repr(made) == repr(wanted).replace("Theirs", "Mine")
    assert made._asdict() == wanted._asdict()
    assert hash(made) == hash(wanted)


def test_named_tuples_change_only_by_copies() -> None:
    made = Mine(1)
    assert made._replace(first=5, third=(9,)) == Mine(5, "two", (9,))
    assert made.twice() == 2
    with pytest.raises(ValueError, match="fourth"):
        made._replace(fourth=1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        made.first = 2  # type: ignore[misc]
    assert Mine._make([1, "b", ()]) == Mine(1, "b")
    match made:
        case Mine(number, second=word):
            assert (number, word) == (1, "two")


def test_named_tuples_are_copied_and_pickled_whole() -> None:
    made = Mine(1, "x", (2, 3))
    for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(other) is Mine
        assert other == made
    replaced: typing.Any = made
    assert replaced.__replace__(first=7) == made._replace(first=7)


class Loud(Exception):
    pass


@pytest.mark.parametrize("kind", [light.contextlib, contextlib], ids=["light", "original"])
def test_a_stack_undoes_all_in_reverse(kind: typing.Any) -> None:
    seen: list[object] = []

    def fail(word: str) -> None:
        seen.append(word)
        raise Loud(word)

    with pytest.raises(Loud, match="early"), kind.ExitStack() as stack:  # noqa: PT012
        stack.callback(seen.append, 1)
        stack.callback(fail, "early")
        stack.callback(fail, "late")
        stack.callback(seen.append, 2)
        raise ValueError("body")
    assert seen == [2, "late", "early", 1]


@pytest.mark.parametrize("kind", [light.contextlib, contextlib], ids=["light", "original"])
def test_a_stack_can_give_away_what_it_has(kind: typing.Any) -> None:
    seen: list[int] = []
    with kind.ExitStack() as stack:
        stack.callback(seen.append, 1)
        other = stack.pop_all()
    assert seen == []
    other.close()
    assert seen == [1]
    with pytest.raises(Loud), kind.ExitStack() as stack:  # noqa: PT012
        stack.callback(seen.append, 2)
        raise Loud
    assert seen == [1, 2]


@pytest.mark.parametrize("kind", [light.contextlib, contextlib], ids=["light", "original"])
def test_suppress(kind: typing.Any) -> None:
    with kind.suppress(OSError, ValueError):
        raise FileNotFoundError
    with pytest.raises(KeyError), kind.suppress(OSError):
        raise KeyError
    with kind.suppress():
        pass


def test_context_managers_are_the_originals() -> None:
    seen = []

    @light.contextlib.contextmanager
    def managed(word: str) -> typing.Iterator[str]:
        seen.append("in")
        try:
            yield word
        finally:
            seen.append("out")

    for _ in range(2):
        with managed("x") as word:
            assert word == "x"
    assert seen == ["in", "out"] * 2


def test_caches() -> None:
    calls = []

    @light.functools.lru_cache(maxsize=2)
    def double(number: int) -> int:
        calls.append(number)
        return 2 * number

    assert [double(n) for n in (1, 1, 2, 3, 1)] == [2, 2, 4, 6, 2]
    assert calls == [1, 2, 3, 1]
    double.cache_clear()
    assert double(1) == 2
    assert calls[-1] == 1

    @light.functools.cache
    def none() -> None:
        calls.append(0)

    none()
    none()
    assert calls.count(0) == 1


def test_cached_property() -> None:
    made = []

    class Thing:
        @light.functools.cached_property
        def value(self) -> int:
            made.append(1)
            return len(made)

    one, other = Thing(), Thing()
    assert (one.value, one.value, other.value) == (1, 1, 2)
    assert vars(one) == {"value": 1}


def test_what_is_used_of_a_stand_in_is_there() -> None:
    # A type checker sees the originals, and would not miss it.
    checked = 0
    for path in Path(light.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {
            alias.asname or alias.name: getattr(light, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "nsbox.light"
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
                assert hasattr(names[node.value.id], node.attr), f"{path}:{node.lineno}: {node.value.id}.{node.attr}"
                checked += 1
    assert checked > 50


def test_the_lock_is_the_lock() -> None:
    assert type(light.threading.Lock()) is type(threading.Lock())


HEAVY = ("typing", "contextlib", "functools", "collections", "enum", "re", "socket", "threading", "random", "importlib")


@pytest.mark.parametrize("module", ["nsbox", "nsbox.cli", "nsbox.cli_run", "nsbox.api"])
def test_nothing_heavy_is_imported_on_the_way_of_a_run(module: str) -> None:
    code = f"import sys; before = set(sys.modules); import {module}; print(*sorted(set(sys.modules) - before))"
    root = str(Path(light.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {[root, *sys.path]!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = done.stdout.split()
    assert module in found
    assert not set(HEAVY) & set(found)
