"""What a process executes past the sandboxes is counted once, with its origin, and can be forbidden."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
import ctypes, json, os, pty, subprocess, sys, threading
from nsbox import coverage
def attempt(function):
    try:
        function()
    except coverage.Uncovered as error:
        print(f"refused: {error}", file=sys.stderr)
"""


ASYNC = """
import asyncio
async def main():
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
asyncio.run(main())
"""


def run(code: str, *, wait: bool = False) -> tuple[dict[str, Any], str]:
    """Run code in a fresh interpreter: an audit hook is for ever. Its last snapshot, and standard error."""
    if wait:
        code += "\ntry: os.wait()\nexcept OSError: pass"
    text = HEAD + textwrap.dedent(code) + "\nprint('SNAPSHOT', json.dumps(coverage.snapshot()))\n"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": "/nonexistent:/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.rpartition("SNAPSHOT ")[2])
    return found, done.stderr


@pytest.mark.parametrize(
    "code, kind",
    [
        ("subprocess.run(['true'])", "subprocess"),
        ("subprocess.run(['/bin/true'], close_fds=False)", "subprocess"),
        ("os.system('true')", "system"),
        ("os.popen('true').read()", "subprocess"),
        ("os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)", "posix_spawn"),
        ("pty.spawn(['true'])", "pty"),
        (ASYNC, "subprocess"),
    ],
)
def test_each_way_counts_once_with_its_origin(code: str, kind: str) -> None:
    found, _ = run(f"coverage.install()\n{code}")
    assert (found["bare"], found["sandboxed"], found["percent"]) == (1, 0, 0.0)
    (origin,) = found["origins"]
    assert origin["kind"] == kind
    assert origin["where"].startswith("__main__:")


@pytest.mark.parametrize(
    "code",
    [
        "os.spawnvp(os.P_WAIT, 'true', ['true'])",
        "os.spawnv(os.P_WAIT, '/bin/true', ['true'])",
        """
        pid = os.fork()
        if pid == 0:
            os.execvp('true', ['true'])
        os.waitpid(pid, 0)
        """,
        """
        pid = os.fork()
        if pid == 0:
            subprocess.run(['true'])
            os._exit(0)
        os.waitpid(pid, 0)
        """,
    ],
)
def test_forked_children_count_for_their_parent(code: str) -> None:
    found, _ = run("coverage.install()\n" + textwrap.dedent(code))
    assert found["bare"] == 1
    assert not found["reported_by_parent"]


def test_percent_and_sandboxed() -> None:
    found, _ = run(
        """
        coverage.install()
        coverage.sandboxed(3)
        os.system('true')
        pid = os.fork()
        if pid == 0:
            coverage.sandboxed(4)
            os._exit(0 if coverage.snapshot()["reported_by_parent"] else 1)
        assert os.waitpid(pid, 0)[1] == 0
        """
    )
    assert (found["bare"], found["sandboxed"], found["percent"]) == (1, 7, 87.5)
    assert run("coverage.install()")[0]["percent"] is None


@pytest.mark.parametrize(
    "code",
    [
        "subprocess.run(['touch', P])",
        "os.system('touch ' + P)",
        "os.posix_spawn('/usr/bin/touch', ['touch', P], {})",
        "pty.spawn(['touch', P])",
        "os.spawnvp(os.P_WAIT, 'touch', ['touch', P])",
        "os.execvp('touch', ['touch', P])",
    ],
)
def test_enforce_refuses(code: str, tmp_path: Path) -> None:
    place = tmp_path / "made"
    run(f"P = {str(place)!r}\nif 'exec' not in {code!r}: {code}", wait=True)
    assert place.exists() or "exec" in code
    place.unlink(missing_ok=True)
    found, errors = run(f"P = {str(place)!r}\ncoverage.install(enforce=True)\nattempt(lambda: {code})")
    assert not place.exists()
    assert (found["bare"], found["refused"]) == (0, 1)
    assert "refused" in errors or "spawn" in code


def test_kinds_by_choice() -> None:
    found, _ = run("coverage.install(only=['dlopen'])\nctypes.CDLL(None)\nctypes.CDLL('libc.so.6')\nos.system('true')")
    assert (found["loads"], found["bare"]) == (1, 0)
    assert found["origins"][0]["kind"] == "dlopen"
    assert "no kind" in run("try: coverage.install(only=['x'])\nexcept ValueError as e: print(e, file=sys.stderr)")[1]


def test_uninstall_reset_and_own() -> None:
    found, _ = run(
        """
        coverage.install()
        os.system('true')
        coverage.reset()
        with coverage.own():
            os.system('true')
        coverage.uninstall()
        os.system('true')
        """
    )
    assert found["bare"] == 0


def test_allowed_modules() -> None:
    found, _ = run(
        """
        import types
        tool = types.ModuleType("tool.deep")
        exec("import os\\ndef go(): return os.system('true')", tool.__dict__)
        coverage.install(enforce=True, allow=["tool"])
        assert tool.go() == 0
        attempt(lambda: os.system('true'))
        """
    )
    assert (found["bare"], found["refused"]) == (0, 1)


def test_threads() -> None:
    found, _ = run(
        """
        coverage.install()
        def work():
            for _ in range(5): os.system('true')
        threads = [threading.Thread(target=work) for _ in range(4)]
        [t.start() for t in threads]; [t.join() for t in threads]
        """
    )
    assert found["bare"] == 20
    (origin,) = found["origins"]
    assert origin["count"] == 20


def test_it_is_there_with_the_package() -> None:
    words = [sys.executable, "-c", "import nsbox; nsbox.coverage.install(); print(nsbox.coverage.installed())"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "True\n"
