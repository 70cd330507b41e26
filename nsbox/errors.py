"""Every error that nsbox raises, in one hierarchy.

Each class is also the built-in kind a caller would expect, so that ``except ValueError`` around a bad option and
``except OSError`` around a host that lacks a feature both work without importing anything from here.
"""

import os


class NsboxError(Exception):
    """Base of all errors raised by nsbox. They can be pickled, as a pool of processes does."""

    def __reduce__(self) -> tuple[object, ...]:
        # The original calls the class with ``args``, which are not what these classes are called with.
        state = dict(vars(self))
        if isinstance(self, OSError):
            state["errno"] = self.errno
        return _again, (type(self), self.args, state)


def _again(kind: type[NsboxError], args: tuple[object, ...], state: dict[str, object]) -> NsboxError:
    error = kind.__new__(kind, *args)
    if isinstance(error, OSError):
        OSError.__init__(error, *args)
    for name, value in state.items():
        setattr(error, name, value)
    return error


class SpecError(NsboxError, ValueError):
    """What the caller asked for is malformed or contradicts itself. Nothing was started."""


class MountRefused(SpecError):
    """The guard refuses a mount: the sensitive ``path``, ``why``, and the ``word`` that lets it through."""

    def __init__(self, message: str, *, path: str, why: str, word: str) -> None:
        super().__init__(message)
        self.path, self.why, self.word = path, why, word


class HostError(NsboxError, OSError):
    """The host lacks a layer that was asked for. ``remedy`` says what mends it."""

    def __init__(self, message: str, *, remedy: str = "", errno: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.errno = errno

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class SandboxUnavailable(HostError):
    """No sandbox can be had on this host at all (no user namespaces, no helper). Nothing was run bare instead."""


class SetupError(NsboxError, OSError):
    """A step of the set-up failed: ``stage`` (what was being done), ``target`` (to what), ``errno``, ``remedy``."""

    def __init__(self, stage: str, errno: int, *, target: str = "", remedy: str = "", detail: str = "") -> None:
        reason = os.strerror(errno) if errno else "failed"
        super().__init__(errno, reason)
        self.stage = stage
        self.errno = errno
        self.target = target
        self.remedy = remedy
        self.detail = detail
        self.reason = reason

    def __str__(self) -> str:
        text = f"set-up stopped at {self.stage}"
        if self.target:
            text += f" of {self.target}"
        text += f": {self.detail or self.reason}"
        return f"{text}; {self.remedy}" if self.remedy else text


class CommandError(NsboxError, OSError):
    """The sandbox was ready but the command could not be executed. ``exit_code`` is 126, or 127 when it is missing."""

    def __init__(self, command: str, errno: int, exit_code: int) -> None:
        super().__init__(errno, os.strerror(errno))
        self.command = command
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"cannot execute {self.command!r} inside the sandbox: {self.strerror}"


class LimitExceeded(NsboxError):
    """Raised by ``Result.check()`` when a limit ended the run; ``limit`` names it."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class TimeoutExceeded(LimitExceeded, TimeoutError):
    """The wall clock or the CPU-time limit ended the run."""


class CommandFailed(NsboxError):
    """Raised by ``Result.check()`` when the command ended with a status other than 0."""
