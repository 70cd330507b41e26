"""Runs the examples of a page of documentation: blocks of a terminal, of shell, of Python, and of a Python session.

As a program, ``python _examples.py PAGE...`` runs all blocks of pages in the current directory, in their order. What a
block of Python defines is there for the next: a page is read from its beginning to its end.
"""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

MARK = "--- end of a command ---"
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: what ``play`` runs; ``text`` is no code
LANGUAGES = ("console", "sh", "python", "pycon")


def blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """(language, code) of the fenced blocks in these languages, or of all."""
    return [(name, code) for name, code in FENCE.findall(text) if not languages or name in languages]


def put_nsbox_into(folder: Path) -> Path:
    """A directory for PATH in which ``nsbox`` is the one that is being tested."""
    folder.mkdir()
    program = folder / "nsbox"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nsbox "$@"\n')
    program.chmod(0o755)
    return folder


def typed(block: str) -> list[tuple[str, str]]:
    """(command, what it should print) of a block that shows a terminal."""
    steps: list[tuple[str, str]] = []
    for line in block.splitlines(keepends=True):
        if line.startswith("$ "):
            steps.append((line[2:].strip(), ""))
        else:
            steps[-1] = (steps[-1][0], steps[-1][1] + line)
    return steps


def as_pattern(text: str) -> str:
    """``...`` in what a command prints stands for anything."""
    return re.escape(text).replace(re.escape("..."), r"[\s\S]*")


def type_all(steps: list[tuple[str, str]]) -> None:
    """Type commands into one shell, one after the other, and compare what they print."""
    # The subshell gives the next command the status that $? has to show.
    script = "umask 022\n" + "".join(f"{words}\ns=$?; echo '{MARK}'; (exit $s)\n" for words, _ in steps)
    done = subprocess.run(
        ["sh"], input=script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    )
    for (words, expected), printed in zip(steps, done.stdout.split(MARK + "\n"), strict=False):
        # The warning is for hosts without cgroups for this caller; the pages are not written on one.
        printed = re.sub(r"nsbox: watched, not held .*\n", "", printed)
        assert re.fullmatch(as_pattern(expected), printed), f"$ {words}\n{printed}"
    assert done.stdout.count(MARK) == len(steps)


def type_python(code: str, names: dict[str, Any], page: str) -> None:
    """A session at Python's prompt."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    test = doctest.DocTestParser().get_doctest(code, names, page, page, 0)
    assert test.examples, code
    said: list[str] = []
    runner.run(test, out=said.append, clear_globs=False)
    assert not runner.failures, "".join(said)
    names.update(test.globs)


def play(page: Path) -> None:
    """Run all blocks of a page."""
    names: dict[str, Any] = {"__name__": "example"}
    for language, code in blocks(page.read_text(), *LANGUAGES):
        if language == "console":
            type_all(typed(code))
        elif language == "sh":
            subprocess.run(["sh", "-ec", code], check=True, timeout=120, stdin=subprocess.DEVNULL)
        elif language == "pycon":
            type_python(code, names, page.name)
        else:
            exec(compile(code, page.name, "exec"), names)


if __name__ == "__main__":
    os.umask(0o022)
    for argument in sys.argv[1:]:
        play(Path(argument))
