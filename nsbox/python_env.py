"""What of a Python installation must be visible, at the same paths, for it and its packages to work inside.

Nothing under /usr: that is inside anyway. Never a home directory, nor a folder that many programs share: of those only
the parts that belong to the interpreter.
"""

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from nsbox.errors import SpecError

# What an installation says of itself. sys.path without the script's folder and without PYTHONPATH, which is of the
# caller's environment; and what an editable installation maps in by a finder instead of a path.
_ASK = """
import os, site, sys, sysconfig
def _about():
    given = {os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    first = 0 if getattr(sys.flags, "safe_path", False) else 1
    paths = [p for p in sys.path[first:] if p and os.path.abspath(p) not in given]
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):
            paths += [p for p in getattr(module, "MAPPING", {}).values() if isinstance(p, str)]
    return {
        "executable": sys.executable, "base": getattr(sys, "_base_executable", None) or sys.executable,
        "prefixes": [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix], "paths": paths,
        "stdlib": [p for p in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")) if p],
        "library": os.path.join(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or ""),
        "userbase": site.getuserbase() if site.ENABLE_USER_SITE else None,
        "version": list(sys.version_info[:2]),
    }
"""


class PythonEnvironment(NamedTuple):
    """An interpreter, and what must be mounted, read-only and at the same place, and set for it."""

    executable: str
    mounts: tuple[str, ...]
    env: dict[str, str]
    folders: tuple[str, ...]  #: where its packages are
    version: tuple[int, int]


def of(python: str | None = None) -> PythonEnvironment:
    """The environment of the interpreter at ``python``, or of the one that runs this. Raises SpecError."""
    about = _own() if python is None else _asked(python)
    executable = about["executable"]
    if not executable:
        raise SpecError("python: this interpreter does not know its own path; name one with --python FILE")
    home = os.path.expanduser("~")
    mounts = _outermost(_parts(about, home))
    mounts += [hop for hop in _links(executable) if not _covered(hop, mounts)]
    env = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    if about["userbase"] and any(_beneath(path, about["userbase"]) for path in mounts):
        # HOME is another one inside, and the packages of the user are found from there.
        env["PYTHONUSERBASE"] = about["userbase"]
    folder = os.path.dirname(executable)
    if not _beneath(folder, "/usr"):
        env["PATH"] = f"{folder}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    folders = tuple(path for path in about["paths"] if os.path.isdir(path))
    major, minor = about["version"]
    return PythonEnvironment(executable, tuple(mounts), env, folders, (major, minor))


def in_reach(python: PythonEnvironment, source: str, target: str | None, mounts: Iterable[str]) -> str | None:
    """What of an interpreter somebody inside could change who may write below ``source`` on the host; None: nothing.

    ``target`` is where he sees that, None for nowhere; ``mounts`` are the interpreter's, read-only at their own places.
    They protect what they hold only at the top of what is writable: a folder above a mount can be renamed, and another
    one put in its place, a mount point cannot (rename(2), EBUSY)."""
    source = os.path.realpath(source)
    held = [m for m in mounts if source == target == os.path.dirname(m) and os.path.realpath(m) == m]
    for path in (python.executable, *python.mounts, *python.folders):
        for name in (path, os.path.realpath(path)):
            if (_beneath(name, source) or _beneath(source, name)) and not _covered(name, held):
                return name
    return None


def _own() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(_ASK, names)
    about: dict[str, Any] = names["_about"]()
    return about


def _asked(python: str) -> dict[str, Any]:
    import json
    import shutil
    import subprocess

    found = shutil.which(python)
    if found is None:
        raise SpecError(f"--python: {python!r} is not a program; name an interpreter")
    code = f"{_ASK}\nimport json\nprint(json.dumps(_about()))"
    try:
        answer = subprocess.run(
            [os.path.abspath(found), "-c", code], capture_output=True, check=True, timeout=60, cwd="/"
        )
        about: dict[str, Any] = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        raise SpecError(f"--python: {python!r} does not answer as a Python 3 interpreter does") from None
    return about


def _parts(about: dict[str, Any], home: str) -> Iterable[str]:
    """Existing paths outside /usr that belong to the interpreter."""
    version = "python{}.{}".format(*about["version"])
    candidates = [*about["stdlib"], about["library"], about["base"]]
    for prefix in dict.fromkeys(about["prefixes"]):
        if not _shared(prefix, home):
            candidates.append(prefix)
            continue
        # An interpreter installed into a folder that others share, as ~/.local.
        candidates += [f"{prefix}/lib/{version}", f"{prefix}/pyvenv.cfg"]
    candidates += [path for path in about["paths"] if not _shared(path, home)]
    for path in candidates:
        path = os.path.abspath(path) if path else ""
        if path and os.path.exists(path) and not _beneath(path, "/usr"):
            yield path


def _shared(path: str, home: str) -> bool:
    """Whether a folder is more than one installation's own: a home directory, what contains it, or one of its folders
    that programs have in common."""
    path = os.path.realpath(path)
    common = {"/", "/opt", "/home", "/tmp", "/var", "/srv", "/mnt", f"{home}/.local", f"{home}/.local/lib"}
    return _beneath(os.path.realpath(home), path) or path in {os.path.realpath(item) for item in common}


def _links(executable: str) -> Iterable[str]:
    """Every path on the way from the executable's name to the file itself (execve(2) follows them inside)."""
    seen = []
    while executable not in seen and not _beneath(executable, "/usr"):
        seen.append(executable)
        if not os.path.islink(executable):
            break
        executable = os.path.normpath(os.path.join(os.path.dirname(executable), os.readlink(executable)))
    return seen


def _beneath(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _covered(path: str, mounts: Iterable[str]) -> bool:
    return any(_beneath(path, mount) for mount in mounts)


def _outermost(paths: Iterable[str]) -> list[str]:
    """The paths that do not lie in another one of them."""
    out: list[str] = []
    for path in sorted(set(paths), key=len):
        if not _covered(path, out):
            out.append(path)
    return out
