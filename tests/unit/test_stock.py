"""The stock of things made ahead, with things that cost nothing."""

import itertools
import os
import threading
from collections.abc import Iterator

import pytest
from conftest import until

from nsbox.errors import HostError, SandboxUnavailable, SpecError
from nsbox.stock import Stock

PATIENCE_S = 20.0


class Things:
    """Makes numbers, and knows what became of them."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.made: list[int] = []
        self.discarded: list[int] = []
        self.broken: set[int] = set()
        self.trouble: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def make(self) -> int:
        self.gate.wait(PATIENCE_S)
        if self.trouble is not None:
            raise self.trouble
        self.made.append(next(self.numbers))
        return self.made[-1]

    def stock(self, **options: object) -> "Stock[int]":
        return Stock(self.make, self.discarded.append, lambda n: n not in self.broken, **options)  # type: ignore[arg-type]


@pytest.fixture
def things() -> Iterator[Things]:
    made = Things()
    yield made
    made.gate.set()


def test_is_filled_and_nothing_is_given_twice(things: Things) -> None:
    stock = things.stock(size=3)
    assert stock.wait_full(PATIENCE_S)
    taken = [stock.take() for _ in range(20)]
    assert len(set(taken)) == 20
    stock.close()
    assert sorted(taken + things.discarded) == sorted(things.made)


def test_threads_take_each_his_own(things: Things) -> None:
    stock, taken = things.stock(size=4), list[int]()

    def work() -> None:
        for _ in range(50):
            taken.append(stock.take())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stock.close()
    assert len(set(taken)) == len(taken) == 400


def test_empty_makes_one_in_the_callers_thread(things: Things) -> None:
    stock = things.stock(size=1)
    assert stock.wait_full(PATIENCE_S)
    things.gate.clear()
    assert stock.take() == 1
    threading.Timer(0.05, things.gate.set).start()
    assert stock.take() in things.made[1:]
    assert stock.counts().missed == 1
    stock.close()


def test_empty_waits(things: Things) -> None:
    things.gate.clear()
    stock = things.stock(size=1, when_empty="wait")
    with pytest.raises(SandboxUnavailable, match="in time"):
        stock.take(0.02)
    threading.Timer(0.05, things.gate.set).start()
    assert stock.take(PATIENCE_S) == 1
    stock.close()


def test_empty_is_an_error(things: Things) -> None:
    things.gate.clear()
    stock = things.stock(size=1, when_empty="error")
    with pytest.raises(SandboxUnavailable, match="no sandbox is ready"):
        stock.take()
    things.gate.set()
    stock.close()


def test_demand_raises_the_number_to_the_ceiling(things: Things) -> None:
    things.gate.clear()
    stock = things.stock(size=1, most=6, when_empty="error")
    sizes = []
    for _ in range(4):
        with pytest.raises(SandboxUnavailable):
            stock.take()
        sizes.append(stock.counts().size)
    assert sizes == [2, 4, 6, 6]
    things.gate.set()
    assert until(lambda: stock.counts().ready == 6, PATIENCE_S)
    stock.close()


def test_without_demand_it_falls_to_the_floor(things: Things, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsbox.stock.IDLE_S", 0.01)
    things.gate.clear()
    stock = things.stock(size=1, most=3, when_empty="error")
    for _ in range(2):
        with pytest.raises(SandboxUnavailable):
            stock.take()
    assert stock.counts().size == 3
    things.gate.set()
    assert until(lambda: stock.counts().size == 1, PATIENCE_S)
    assert until(lambda: stock.counts().ready == 1, PATIENCE_S)  # the surplus goes as well
    stock.close()


def test_what_is_too_old_is_replaced(things: Things) -> None:
    stock = things.stock(size=2, max_age=0.05)
    assert until(lambda: len(things.discarded) >= 2, PATIENCE_S)
    assert stock.take() not in things.discarded
    stock.close()


def test_what_is_broken_is_not_given_out(things: Things) -> None:
    stock = things.stock(size=2)
    assert stock.wait_full(PATIENCE_S)
    things.broken.add(1)
    assert stock.take() == 2
    assert things.discarded == [1]
    stock.close()


def test_trouble_is_told_to_who_waits_and_ends(things: Things) -> None:
    things.trouble = HostError("no room", remedy="make some")
    stock = things.stock(size=1, when_empty="wait")
    with pytest.raises(HostError, match="no room"):
        stock.take(PATIENCE_S)
    things.trouble = None
    assert until(lambda: stock.counts().ready > 0, PATIENCE_S)
    assert stock.take() == 1
    stock.close()


def test_closed_under_load(things: Things) -> None:
    stock, taken, refused = things.stock(size=3), list[int](), list[str]()

    def work() -> None:
        try:
            while True:
                taken.append(stock.take())
        except SandboxUnavailable as error:
            refused.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert until(lambda: len(taken) > 20, PATIENCE_S)
    stock.close()
    stock.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(refused) == 4
    assert until(lambda: sorted(taken + things.discarded) == sorted(things.made), PATIENCE_S)


def test_who_waits_is_told_of_the_end(things: Things) -> None:
    things.gate.clear()
    stock, heard = things.stock(size=1, when_empty="wait"), list[object]()

    def work() -> None:
        try:
            heard.append(stock.take())
        except SandboxUnavailable as error:
            heard.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert until(lambda: stock.counts().missed == 1, PATIENCE_S)
    threading.Timer(0.02, things.gate.set).start()
    stock.close()
    thread.join(PATIENCE_S)
    assert heard in (["the pool is closed; make another"], [1])  # what was being made comes first, or the end does


def test_a_forked_child_has_no_part_in_it(things: Things) -> None:
    stock = things.stock(size=2)
    assert stock.wait_full(PATIENCE_S)
    pid = os.fork()
    if pid == 0:
        try:
            stock.take()
        except SandboxUnavailable:
            stock.close()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert stock.counts().ready == 2
    stock.close()


@pytest.mark.parametrize("options", [{"size": 0}, {"size": 5, "most": 4}, {"size": 1, "max_age": 0}])
def test_bad_options(things: Things, options: dict[str, int]) -> None:
    with pytest.raises(SpecError):
        things.stock(**options)


def test_bad_word(things: Things) -> None:
    with pytest.raises(SpecError, match="none of make, wait, error"):
        things.stock(size=1, when_empty="perhaps")


@pytest.mark.parametrize("trouble", [HostError("full"), OSError(24, "Too many open files")])
def test_it_is_filled_again_after_a_want(things: Things, trouble: Exception) -> None:
    things.trouble = trouble
    stock = things.stock(size=1, when_empty="wait")
    with pytest.raises(type(trouble)):
        stock.take(PATIENCE_S)
    things.trouble = None
    assert stock.wait_full(PATIENCE_S)
    stock.close()
