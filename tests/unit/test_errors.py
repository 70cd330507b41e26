"""Errors cross from one process of the caller's to another as they are."""

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from nsbox import errors
from nsbox.boundary import LogError

EVERY = [
    errors.SpecError("mistake"),
    errors.MountRefused("refused", path="/p", why="a key", word="keys"),
    errors.HostError("lacks it", remedy="install it", errno=38),
    errors.HostError("lacks it"),
    errors.SandboxUnavailable("none", remedy="run: nsbox doctor"),
    errors.SetupError("mount", 1, target="/t", remedy="r", detail="d"),
    errors.CommandError("cat", 2, 127),
    errors.LimitExceeded("memory", "too much"),
    errors.TimeoutExceeded("timeout", "too long"),
    errors.CommandFailed("status 1"),
    LogError("/log", "full", errno=28).after("applied", ["a"]),
]


def told(error: BaseException) -> tuple[object, ...]:
    of_the_system = [getattr(error, name, "none") for name in ("errno", "strerror", "filename")]
    return (type(error), str(error), repr(error), error.args, vars(error), *of_the_system)


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_pickled_and_copied_they_are_the_same(error: errors.NsboxError) -> None:
    assert told(pickle.loads(pickle.dumps(error))) == told(error)
    assert told(copy.copy(error)) == told(error)


def fail() -> None:
    raise EVERY[5]


def test_they_come_out_of_a_pool_of_processes() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, pytest.raises(errors.SetupError, match="/t"):
        pool.submit(fail).result()
