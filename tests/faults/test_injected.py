"""A launch that breaks at each of its steps: the error names the step, nothing is left, and the next launch works.

What is left is looked for by the guard around every test here (tests/conftest.py).
"""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nsbox
from nsbox import _native, api, crossing, janitor
from nsbox import launch as launching
from nsbox.errors import NsboxError, SandboxUnavailable, SetupError
from nsbox.resources import cgroup, ids, scratch, skeleton

# "request" has nothing behind it that could break, and a command that cannot be executed has tests of its own.
STAGES = [name for name in _native.STAGES if name not in ("request", "exec", "run")]


def works() -> None:
    """The next launch is as good as any."""
    result = nsbox.run(["sh", "-c", "echo works"])
    assert (result.status, result.stdout) == (0, b"works\n")


@pytest.mark.parametrize("err", [errno.EPERM, errno.ENOMEM])
@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_below(monkeypatch: pytest.MonkeyPatch, stage: str, err: int, tmp_path: Path) -> None:
    if stage == "source" and os.geteuid() != 0:
        pytest.skip("the sources of an ordinary user are opened by init, as part of building the root")
    monkeypatch.setattr(launching, "fault", (_native.STAGES.index(stage), -err))
    with pytest.raises(NsboxError) as caught:
        nsbox.run(["true"])
    assert caught.value.errno == err  # type: ignore[attr-defined]
    if isinstance(caught.value, SetupError):
        assert stage in str(caught.value)
    monkeypatch.undo()
    works()


def steps() -> dict[str, tuple[Any, str]]:
    """What a launch does in Python: name → (where it is, its name there)."""
    found: dict[str, tuple[Any, str]] = {
        "command": (launching, "command"),
        "blob": (launching, "launch_blob"),
        "pipe": (launching, "pipe"),
        "scratch": (scratch, "Scratch"),
        "ask": (launching, "_ask"),
        "watch": (api, "Run"),
        "drive": (crossing, "drive"),
    }
    if os.geteuid() == 0:
        found["ids"] = (ids.IdRanges, "take")
    if cgroup.discover(launching.probe.host().state).strength("pids")[0]:
        found |= {"cgroup": (cgroup.Hierarchy, "make"), "joined": (cgroup.Cgroup, "joined")}
    return found


def breaking(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, error: BaseException, after: int = 0) -> None:
    """Have a function raise ``error`` once it has been called ``after`` times."""
    real: Callable[..., Any] = getattr(where, name)
    calls = [0]

    def broken(*args: object, **options: object) -> object:
        calls[0] += 1
        if calls[0] > after:
            raise error
        return real(*args, **options)

    monkeypatch.setattr(where, name, broken)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many"), MemoryError(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("step", steps())
def test_each_step_above(monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException, tmp_path: Path) -> None:
    options = {"scratch": str(tmp_path)} if step == "scratch" else {}
    breaking(monkeypatch, *steps()[step], error)
    with pytest.raises(type(error)):
        nsbox.run(["sleep", "30"], stdin=b"x", **options)
    monkeypatch.undo()
    works()
    janitor.flush()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("after", [1, 2])
def test_the_second_and_third_pipe(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    breaking(monkeypatch, launching, "pipe", OSError(errno.EMFILE, "too many"), after)
    with pytest.raises(OSError, match=r"Too many open files: .*RLIMIT_NOFILE"):
        nsbox.run(["true"], stdin=b"x")
    monkeypatch.undo()
    works()


@pytest.mark.parametrize("name", ["_make", "_make_dev", "_copy", "_set_modes"])
def test_a_skeleton_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    breaking(monkeypatch, skeleton, name, OSError(errno.ENOSPC, "no space"), 3 if name == "_copy" else 0)
    with pytest.raises(OSError, match="no space"):
        nsbox.run(["true"], hostname=f"no-skeleton-{os.getpid()}")  # a kind that is not there yet
    monkeypatch.undo()
    works()


def test_a_helper_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_zygote", None)
    monkeypatch.setattr(_native, "lib", Refusing(_native.lib))
    with pytest.raises(SandboxUnavailable, match="the helper process cannot be started"):
        nsbox.run(["true"])
    monkeypatch.undo()
    works()


class Refusing:
    """The compiled module, which cannot start a process just now."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def nsb_zygote_start(self, _: object) -> int:
        return -errno.EAGAIN


def test_too_few_descriptors_at_every_point() -> None:
    """One descriptor more at each turn: every call that needs one fails once, for real."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(200) if not os.path.exists(f"/proc/self/fd/{number}")]
    errors: list[str] = []
    try:
        for number in free[:40]:
            resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
            try:
                assert nsbox.run(["true"], stdin=b"x").ok
                break
            except (NsboxError, OSError) as error:
                errors.append(str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                janitor.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 5 < len(errors) < 40
    assert [text for text in errors if "Too many open files" not in text] == []
    works()
