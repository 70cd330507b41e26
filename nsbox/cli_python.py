"""``nsbox python``: code with an interpreter of the host and its packages, in a fresh sandbox."""

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from nsbox import profiles, python_env
from nsbox.binds import Bind
from nsbox.cli_options import PYTHON
from nsbox.cli_run import run, spec_of
from nsbox.errors import SpecError
from nsbox.spec import Spec


def run_python(values: Mapping[str, Any], words: Sequence[str]) -> int:
    """Run ``FILE``, ``-`` or ``-c CODE`` and its arguments; the exit status."""
    if not words:
        raise SpecError("python: no code; write FILE, - for standard input, or -c CODE")
    environment = python_env.of(values.get("python"))
    values = dict(values)
    spec = spec_of(values, PYTHON)
    taken = {bind.target or os.path.abspath(bind.source) for bind in (*spec.ro, *spec.rw)}
    mounts = [Bind(path, path) for path in environment.mounts if path not in taken]
    words = list(words)
    if words[0].startswith("-c"):
        words[:1] = ["-c", words[0][2:]] if len(words[0]) > 2 else ["-c"]
        if len(words) < 2:
            raise SpecError("python: -c wants CODE")
    elif words[0] == "-":
        values["stdin"] = True
    else:
        words[0] = _show(words[0], spec, mounts)
    below = {"ro": mounts, "env": environment.env}
    values.update(profiles.merged(below, {key: values[key] for key in ("ro", "env") if key in values}))
    return run(values, [environment.executable, *words], PYTHON)


def _show(file: str, spec: Spec, mounts: list[Bind]) -> str:
    """Where ``file`` is inside: in what is shown already, else it is added to ``mounts``."""
    path = os.path.abspath(file)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(f"python: {file!r}: {reason}; name a Python file, - for standard input, or -c CODE") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise SpecError(
            f"python: {file!r} is neither a file nor a folder; to read code from a pipe, use - and standard input"
        )
    shown = [*mounts, *spec.ro, *spec.rw, *([spec.workspace] if spec.workspace else [])]
    real = os.path.realpath(path)
    for bind in reversed(shown):
        source = os.path.realpath(bind.source)
        if real == source or real.startswith(source.rstrip("/") + "/"):
            return os.path.join(
                bind.target or os.path.abspath(bind.source), os.path.relpath(real, source)
            ).removesuffix("/.")
    if os.geteuid() == 0 and not mode & stat.S_IROTH:
        # The payload of a root caller has ids of its own, to which the file is somebody else's.
        raise SpecError(
            f"python: {file!r} may be read by its owner alone; chmod o+r it, or pass it by standard input: -"
        )
    mounts.append(Bind(path, path))
    return path
