"""The thread that gives back what sandboxes had."""

import threading
import time
from collections.abc import Iterator

import pytest

from nsbox import janitor


@pytest.fixture(autouse=True)
def nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests have left to be done."""
    monkeypatch.setattr(janitor, "_jobs", [])
    monkeypatch.setattr(janitor, "_at_once", False)


@pytest.fixture
def launching() -> Iterator[None]:
    """A launch that does not end."""
    janitor.launches.append(None)
    yield
    janitor.launches.pop()


def seconds_given() -> float:
    began = time.monotonic()
    janitor.give_way()
    return time.monotonic() - began


@pytest.mark.usefixtures("launching")
def test_a_launch_goes_first_but_not_for_ever() -> None:
    assert seconds_given() >= janitor.PATIENCE_S


def test_without_a_launch_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "PATIENCE_S", 60.0)
    assert seconds_given() < 30


@pytest.mark.usefixtures("launching")
def test_where_much_is_to_be_done_launches_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "PATIENCE_S", 60.0)
    monkeypatch.setattr(janitor, "_jobs", [lambda: None] * janitor.MANY)
    assert seconds_given() < 30


@pytest.mark.usefixtures("launching")
def test_the_end_of_the_process_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "PATIENCE_S", 60.0)
    monkeypatch.setattr(janitor, "_at_once", True)
    assert seconds_given() < 30


def test_the_end_of_the_launch_lets_it_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "PATIENCE_S", 60.0)
    janitor.launches.append(None)
    timer = threading.Timer(0.05, janitor.launches.pop)
    timer.start()
    assert seconds_given() < 30
    timer.join()
    assert not janitor.launches
