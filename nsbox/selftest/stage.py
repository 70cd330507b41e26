"""Where attempts are made: the program that makes them, started outside and inside, and what is noted of each."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from nsbox.errors import HostError

if TYPE_CHECKING:
    from nsbox.report import Result
    from nsbox.spec import Spec

#: where the program is inside
PLACE = "/selftest"
FOLDER = os.path.dirname(os.path.abspath(__file__))
_PATIENCE_S = 600


class Noted(NamedTuple):
    """What came of one attempt."""

    threat: str
    attack: str
    control: str  #: what it came to outside, or where it is let through
    inside: str
    #: stopped; through; absent: there is nothing to attack here; not shown: the control did not work
    result: str


class Stage:
    """One profile on this host, with a folder of its own for files that attempts need."""

    def __init__(self, profile: str, folder: str) -> None:
        self.profile, self.folder = profile, folder
        self._python, self._mounts, self._env = interpreter()
        #: the caller's own environment, for the controls
        self.environment = {**os.environ, "TMPDIR": folder}

    def spec(self, **options: Any) -> "Spec":
        """The profile with some options changed. Raises SpecError."""
        from nsbox.spec import Spec

        return Spec.from_profile(self.profile, **options)

    def run(self, argv: list[str], **options: Any) -> "Result":
        """One command in one sandbox of the profile, which gets all the time that a slow machine needs."""
        from nsbox import api

        return api.run(argv, profile=self.profile, **{"timeout": _PATIENCE_S, "cpu_time": _PATIENCE_S, **options})

    def program(self, *words: str, **options: Any) -> "Result":
        """The program in one sandbox of the profile."""
        ro = [(f"{FOLDER}/attempts", f"{PLACE}/attempts"), *((path, path) for path in self._mounts)]
        env = {**self._env, "PYTHONPATH": PLACE, **options.pop("env", {})}
        return self.run(self.command(*words), ro=[*ro, *options.pop("ro", [])], env=env, **options)

    def command(self, *words: str) -> list[str]:
        """The words that start the program inside."""
        return [self._python, "-m", "attempts", *words]

    def inside(self, *words: str, **options: Any) -> dict[str, str]:
        """What attempts come to inside, by name; nothing for one that was not reached."""
        return parse(self.program(*words, **options).stdout)

    def outside(self, *words: str, **options: Any) -> dict[str, str]:
        """The same outside, as the caller; with ``--control`` as root over namespaces of its own."""
        return parse(self.outside_bytes(*words, **options))

    def outside_bytes(self, *words: str, cwd: str = FOLDER, **options: Any) -> bytes:
        """All that the program says outside."""
        argv = [sys.executable or "python3", "-m", "attempts", *words]
        env = {**self.environment, "PYTHONPATH": FOLDER, "PYTHONDONTWRITEBYTECODE": "1"}
        # Into a file: of a pipe the end would be waited for, and what an attempt leaves behind may hold it.
        with tempfile.TemporaryFile(dir=self.folder) as said:
            subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.DEVNULL,
                cwd=cwd,
                env=env,
                timeout=_PATIENCE_S,
                start_new_session=True,
                check=False,
                **options,
            )
            said.seek(0)
            return said.read()

    def place(self, name: str) -> str:
        """A new folder that sandboxes can be shown."""
        path = tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder)
        os.chmod(path, 0o755)
        return path


def parse(said: bytes) -> dict[str, str]:
    """The lines of the program: attempt → outcome; those that were told what to attack also by their name alone."""
    found = {}
    for line in said.decode("utf-8", "replace").splitlines():
        word, blank, outcome = line.partition(" ")
        if blank:
            found[word] = found[word.partition(":")[0]] = outcome
    return found


def noted(threat: str, attack: str, *, works: bool, stopped: bool, control: str, inside: str) -> Noted:
    """A verdict: what got through is through, whatever the control says. ``inside`` is "" for what was not reached."""
    result = "not shown" if not inside else "through" if not stopped else "stopped" if works else "not shown"
    return Noted(threat, attack, control, inside, result)


def interpreter() -> tuple[str, tuple[str, ...], dict[str, str]]:
    """The Python that runs inside: the host's in /usr, else our own with what must be mounted and set for it. Raises
    HostError."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(path, os.X_OK) and os.path.realpath(path).startswith("/usr/"):
            return path, (), {"PYTHONDONTWRITEBYTECODE": "1"}
    from nsbox import python_env

    try:
        found = python_env.of()
    except Exception as error:
        raise HostError(
            f"selftest: no Python for the attempts inside: /usr/bin/python3 is missing, and {error}",
            remedy="install python3",
        ) from None
    return found.executable, found.mounts, found.env


#: threat → what is done, in the order of the table
STAGED: dict[str, Callable[[Stage], Iterator[Noted]]] = {}


def staged(threat: str) -> Callable[[Callable[[Stage], Iterator[Noted]]], Callable[[Stage], Iterator[Noted]]]:
    """Registers attempts that need something on the host's side as well."""

    def register(function: Callable[[Stage], Iterator[Noted]]) -> Callable[[Stage], Iterator[Noted]]:
        STAGED[threat] = function
        return function

    return register
