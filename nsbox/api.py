"""The calls for users: glue, no decisions."""

from __future__ import annotations

import os

from nsbox.crossing import Crossing, Review, target_of
from nsbox.errors import SpecError
from nsbox.launch import launch, prepare
from nsbox.light import TYPE_CHECKING
from nsbox.report import Result
from nsbox.spec import Spec
from nsbox.supervise import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


Argument = str | bytes | os.PathLike[str]


def run(
    argv: Sequence[Argument],
    spec: Spec | None = None,
    *,
    profile: str | os.PathLike[str] | None = None,
    stdin: bytes | str | int | None = None,
    env: Mapping[str, str] | None = None,
    on_stdout: Callable[[bytes], object] | None = None,
    on_stderr: Callable[[bytes], object] | None = None,
    tty: bool | tuple[int, int] = False,
    on_tty: Callable[[int], object] | None = None,
    publish: Sequence[int | str] = (),
    log: Any = None,
    review: Review | None = None,
    **options: Any,
) -> Result:
    """Run one command in one fresh sandbox and throw the sandbox away.

    ``argv`` is a list, never shell text. ``stdin`` is what the command reads: bytes, text, or a descriptor that is
    passed on as it comes (nothing when None). ``options`` are those of ``Spec``; given with ``spec`` they change a
    copy of it, given with ``profile`` they win over it; ``env`` adds variables to those of ``spec``. ``on_stdout``
    and ``on_stderr`` get a stream as it comes, and that stream is then not kept. With ``tty`` its streams are one
    terminal of the sandbox, read as stdout; (rows, columns) is its size, and ``on_tty`` is told the descriptor of its
    master. ``log`` is where the boundary log goes: a path, a descriptor, a callable, a logger. ``publish`` are ports
    inside that ports of the host's loopback lead to meanwhile: PORT, HOST_PORT:PORT, or PATH:PORT for a unix socket.
    ``review`` is shown what changed as text before it is exported or applied, and says whether it may be. Raises
    SpecError for bad input, HostError for a layer that the host lacks, SetupError for a step that failed,
    CommandError when the command cannot be executed, LogError when the log cannot be written; how the command itself
    ended is in the Result.
    """
    if env is not None:
        options["env"] = {**(spec.env if spec else {}), **env}
    if profile is not None:
        if spec is not None:
            raise SpecError("profile: a spec is given as well; make that one with Spec.from_profile")
        spec = Spec.from_profile(profile, **options)
    else:
        spec = spec.replace(**options) if spec else Spec.from_dict(options)
    words = [os.fsdecode(item) for item in argv] if not isinstance(argv, str | bytes) else []
    crossing = Crossing(spec, words, target_of(spec, log), review)
    data = stdin.encode() if isinstance(stdin, str) else stdin
    handle = None
    try:
        handle = launch(
            prepare(spec),
            argv,
            stdin=data is not None and not tty,
            tty=tty,
            on_ready=crossing.begin,
            on_network=crossing.on_network,
        )
        limits = spec.limits
        watch = Run(
            handle,
            stdin=data,
            timeout=limits.timeout,
            output=limits.output,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            tty=on_tty or bool(tty),
        )
        return crossing.conduct(watch, publish)
    except BaseException as error:
        crossing.fail(error)
        raise
    finally:
        if handle is not None:
            handle.close()
        crossing.close()
