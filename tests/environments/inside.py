"""What nsbox does where this runs, as JSON on standard output; see outer.py and test_places.py.

For each attempt: the exit status, what was said and came out, and what the report says is enforced. ``left`` is what
all of them left behind, ``doctor`` the status of `nsbox doctor`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import Snapshot, difference, snapshot

CHANGE = "cat file; echo more >>file; mkdir -p d && echo new >d/new; rm -r old; mkdir old; ls"


def nsbox(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "nsbox", *words]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)


def attempt(*words: str) -> dict[str, Any]:
    """One ``nsbox run`` with its report."""
    done = nsbox("run", "--timeout", "2m", "--json", *words)
    report = json.loads(done.stdout) if done.stdout.strip() else {}
    known = ("reason", "stdout", "stderr", "enforced")
    return {"status": done.returncode, "said": done.stderr, **{name: report.get(name) for name in known}}


def prepare(directory: Path) -> None:
    (directory / "old").mkdir(parents=True)
    (directory / "file").write_text("hello\n")
    (directory / "old" / "gone").write_text("x")


def attempts(directory: Path) -> dict[str, Any]:
    shared, out = directory / "shared", directory / "out"
    prepare(shared)
    found = {
        "plain": attempt("--", "sh", "-c", "id -u; echo $$; echo x >~/x && cat ~/x; ls /proc | grep -c '^[0-9]'"),
        "read_only": attempt("--ro", f"{shared}:/m", "--", "sh", "-c", "cat /m/file; ! touch /m/x 2>/dev/null"),
        "workspace": attempt("--workspace", str(shared), "--export", str(out), "--", "sh", "-c", CHANGE),
        "read_write": attempt("--rw", f"{shared}:/m", "--", "sh", "-c", "cat /m/file; echo x >/m/x"),
        "memory": attempt("--memory", "64M", "--", "python3", "-c", "bytearray(300 << 20)"),
        "egress": attempt("--allow", "192.0.2.1:80", "--", "true"),
    }
    found["exported"] = sorted(str(path.relative_to(out)) for path in out.rglob("*")) if out.exists() else []
    found["untouched"] = (shared / "file").read_text() == "hello\n" and (shared / "old" / "gone").exists()
    return found


def left(before: Snapshot) -> list[str]:
    deadline = time.monotonic() + 5
    while (lines := difference(before, snapshot())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return lines


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        nsbox("run", "true")  # makes what is kept
        before = snapshot()
        found = attempts(Path(name))
        found |= {"doctor": nsbox("doctor").returncode, "left": left(before), "pid": os.getpid(), "uid": os.geteuid()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
