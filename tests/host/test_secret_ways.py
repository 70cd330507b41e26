"""How secrets get inside other than as files: descriptors and variables, and where their values do not stay."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import until

import nsbox
from nsbox import groups
from nsbox import launch as launching
from nsbox.errors import SetupError, SpecError

NSBOX = [sys.executable, "-m", "nsbox"]
VALUE = "correct-horse/battery+staple"
TOKEN = nsbox.Secret("TOKEN", value=VALUE.encode(), deliver="fd")
OTHER = nsbox.Secret("OTHER", value=b"value of the other", deliver="fd")
VARIABLE = TOKEN._replace(deliver="env")
SAME = f"""test "$(cat <&$TOKEN_FD)" = '{VALUE}' && echo same"""


# ---- descriptors --------------------------------------------------------------------------------------------------


def test_a_descriptor_that_is_read_once() -> None:
    script = """
        echo $TOKEN_FD $OTHER_FD; cat <&3 | wc -c; cat <&3 | wc -c; cat <&4; ls -d /run/secrets
        for fd in /proc/self/fd/*; do readlink $fd | sed "s,^,${fd##*/} ,"; done | grep -v ' /proc'
        sed -n 's/flags:.*\\(.\\)$/\\1/p' /proc/self/fdinfo/3
    """
    result = nsbox.run(["sh", "-c", script], secrets=[TOKEN, OTHER])
    lines = result.stdout_text.splitlines()
    assert lines[:4] == ["3 4", str(len(VALUE)), "0", "***OTHER***0 /dev/null"]
    assert [line.split(":")[0] for line in lines[4:-1]] == ["1 pipe", "2 pipe", "3 pipe", "4 pipe"]
    assert lines[-1] == "0", "O_RDONLY"
    assert b"cannot access '/run/secrets'" in result.stderr
    assert {item["name"]: item["delivered_as"] for item in result.boundary["secrets"]} == {"TOKEN": "fd", "OTHER": "fd"}


def test_as_many_as_there_may_be_beside_files_and_input() -> None:
    many = [nsbox.Secret(f"S{number}", value=f"value-{number}".encode(), deliver="fd") for number in range(8)]
    code = (
        "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:11], os.read(0, 9))\n"
        "print(os.listdir('/run/secrets'))\n"
        "print([os.read(int(os.environ[f'S{n}_FD']), 99)[::-1] for n in range(8)])"
    )
    result = nsbox.run(
        ["python3", "-I", "-c", code], stdin=b"input", secrets=[nsbox.Secret("FILE", value=b"in a file"), *many]
    )
    assert result.stdout_text.splitlines() == [
        f"{list(range(11))} b'input'",
        "['FILE']",
        str([f"value-{number}".encode()[::-1] for number in range(8)]),
    ]
    with pytest.raises(SpecError, match="9 are to be descriptors, more than 8"):
        nsbox.Spec(secrets=[*many, TOKEN])


def test_each_command_of_a_box_gets_its_own() -> None:
    with nsbox.Sandbox(secrets=[TOKEN, OTHER]) as box:
        assert box.run(SAME).stdout == b"same\n"
        assert box.run(f"{SAME}; cat <&4 | wc -c").stdout == b"same\n18\n"
        running = [box.popen(f"sleep 0.2; {SAME}") for _ in range(4)]
        assert [process.wait(20).stdout for process in running] == [b"same\n"] * 4
        terminal = box.terminal(["sh", "-c", "wc -c <&4; test -t 0 && ls /proc/self/fd | wc -l"])
        assert terminal.wait(20).stdout_text.split() == ["18", "6"]
        with box.shell() as shell:
            assert shell.run(SAME).stdout == b"same\n"


def test_no_other_process_has_them() -> None:
    """pid 1 and the watcher of a command have no way to what the command was given, nor has the host side."""
    with nsbox.Sandbox(secrets=[TOKEN]) as box:
        for _ in range(5):  # as many cgroups as are kept
            assert box.run(["true"]).ok
        before = sorted(os.listdir("/proc/self/fd"))
        process = box.popen("readlink /proc/self/fd/3; sleep 60")
        (pipe,) = (text.decode().strip() for _, text in [next(process.output())])
        assert pipe.startswith("pipe:[")
        while not process.pid:
            process.advance(None)
        # An ordinary user may not look into pid 1 and the watcher, which are not dumpable.
        init, *others = box.processes()
        assert [pid for pid in others if pipe in _links(pid)], "the positive control"
        for pid in (init, _parent(init), *(pid for pid in others if _parent(pid) == init), os.getpid()):
            assert pipe not in _links(pid)
        process.kill()
        process.wait(20)
        assert len(os.listdir("/proc/self/fd")) <= len(before)


def _links(pid: int) -> list[str]:
    """What a process has open, as far as it may be seen."""
    found = []
    with contextlib.suppress(FileNotFoundError, PermissionError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def test_S06_what_nobody_has_read_is_gone_in_time() -> None:
    """Of a run, of a command, and of what a command in the background has left behind."""
    late, wait = TOKEN._replace(ttl=1.0), "sleep 2; cat <&3 | wc -c; cat <&4 | wc -c"
    result = nsbox.run(["sh", "-c", wait], secrets=[late, OTHER])
    assert result.stdout == b"0\n18\n"
    assert result.boundary["secrets"][0]["revoked_at"] is not None
    assert nsbox.run(["sh", "-c", "cat <&3 | wc -c; sleep 2"], secrets=[late]).stdout == f"{len(VALUE)}\n".encode()
    with nsbox.Sandbox(secrets=[late, OTHER]) as box:
        box.run(f"({wait}) > /tmp/found & echo", background=True)
        assert box.run(f"cat <&4 | wc -c; {wait}").stdout == b"18\n0\n0\n"
        # Later commands do not get it, and the number of the other is what it was.
        assert box.run("echo .$TOKEN_FD. $OTHER_FD; cat <&3 | wc -c; cat <&4 | wc -c").stdout == b".. 4\n0\n18\n"
        box.run("until test $(wc -l < /tmp/found) = 2; do sleep 0.05; done")
        assert box.read_file("/tmp/found") == b"0\n18\n"


def test_S06_a_pipe_that_is_filled_for_ever_holds_nobody() -> None:
    """A pipe can be opened anew for writing, by the user that it belongs to."""
    script = "exec 5> /proc/self/fd/3; yes never-the-end >&5 & sleep 2; kill $!; echo fine"
    began = time.monotonic()
    result = nsbox.run(["sh", "-c", script], secrets=[TOKEN._replace(ttl=0.5)])
    assert (result.reason, result.stdout) == ("exited", b"fine\n")
    assert time.monotonic() - began < 20


def test_no_descriptors_left_for_them() -> None:
    with pytest.raises(SetupError, match="the descriptors of the secrets"):
        nsbox.run(["true"], secrets=[TOKEN, OTHER], files=6)
    assert nsbox.run(["true"], secrets=[TOKEN, OTHER], files=32).ok


def test_on_the_command_line(tmp_path: Path) -> None:
    environment = {**os.environ, "A_TOKEN": VALUE}
    words = [*NSBOX, "run", "--secret", "TOKEN=env:A_TOKEN", "--secret-fd", "--", "sh", "-c", f"{SAME}; cat <&3"]
    done = subprocess.run(words, env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"same\n"), done.stderr
    done = subprocess.run([*words[:-4], "--secret-env", "--", "true"], env=environment, capture_output=True, timeout=60)
    assert done.returncode == 125
    assert b"--secret-fd: " in done.stderr
    (tmp_path / "p.toml").write_text('secrets = [{name = "TOKEN", env = "A_TOKEN", deliver = "fd"}]\n')
    words = [*NSBOX, "run", "--profile", str(tmp_path / "p.toml"), "--", "sh", "-c", SAME]
    assert subprocess.run(words, env=environment, capture_output=True, timeout=60).stdout == b"same\n"


def test_told_in_the_log(tmp_path: Path) -> None:
    nsbox.run(["true"], secrets=[TOKEN], log=tmp_path / "log")
    text = (tmp_path / "log").read_text()
    (event,) = (e for e in map(json.loads, text.splitlines()) if e["event"] == "secret.deliver")
    assert (event["name"], event["delivered_as"]) == ("TOKEN", "fd")
    assert VALUE not in text


# ---- variables ----------------------------------------------------------------------------------------------------


@pytest.fixture
def blobs(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is sent in a memfd, which the kernel may swap."""
    sent: list[bytes] = []

    def recorded(make: Any) -> Any:
        def made(*args: Any) -> bytes:
            blob: bytes = make(*args)
            sent.append(blob)
            return blob

        return made

    for module, name in ((launching, "launch_blob"), (launching, "command_blob"), (groups, "command_blob")):
        monkeypatch.setattr(module, name, recorded(getattr(module, name)))
    return sent


def test_S06_no_blob_holds_a_variable(blobs: list[bytes]) -> None:
    script = f"""test "$TOKEN" = '{VALUE}' && echo same; echo $PLAIN"""
    options: Any = {"secrets": [VARIABLE, OTHER], "env": {"PLAIN": "this is no secret"}}
    # In a file: what is in argv is in the blob.
    assert nsbox.run(["sh"], stdin=script.encode(), **options).stdout == b"same\nthis is no secret\n"
    with nsbox.Sandbox(**options) as box:
        assert box.run(["sh"], stdin=script).stdout == b"same\nthis is no secret\n"
    # Of the run and of the command; others are for the box, and for watchers that are made ahead of commands.
    assert sum(b"PLAIN=this is no secret" in blob for blob in blobs) == 2, "the control"
    assert not any(VALUE.encode() in blob or b"value of the other" in blob for blob in blobs)


def test_what_a_command_sets_itself_wins() -> None:
    with nsbox.Sandbox(secrets=[VARIABLE], env={"TOKEN": "of the box", "A": "b"}) as box:
        assert box.run(f"""test "$TOKEN" = '{VALUE}' && echo $A""").stdout == b"b\n"
        assert box.run("echo $TOKEN", env={"TOKEN": "mine"}).stdout == b"mine\n"
    assert nsbox.run(["sh", "-c", "env | grep -c ^TOKEN="], secrets=[VARIABLE], env={"TOKEN": "x"}).stdout == b"1\n"


def test_many_and_large_variables() -> None:
    many = [nsbox.Secret(f"V{n}", value=bytes([65 + n]) * 5000, deliver="env") for n in range(11)]
    script = "env | grep ^V | cut -c1-6 | sort | tr '\\n' ' '; env | grep ^V | wc -c"
    with nsbox.Sandbox(secrets=many) as box:
        for result in (box.run(script), nsbox.run(["sh", "-c", script], secrets=many)):
            first, size = result.stdout_text.rsplit(" ", 1)
            assert sorted(first.split()) == sorted(f"V{n}={chr(65 + n) * (6 - len(f'V{n}='))}" for n in range(11))
            assert int(size) == sum(5000 + len(f"V{n}=\n") for n in range(11))
    with pytest.raises(SpecError, match="more than 60000"):
        nsbox.run(["true"], secrets=[nsbox.Secret("BIG", value=bytes(60_001), deliver="fd")])


def _memory(pid: int) -> bytes:
    """All that a process has in memory."""
    found = []
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, rights, *_ = line.split()
            if rights.startswith("r") and "[v" not in line:
                start, end = (int(number, 16) for number in span.split("-"))
                memory.seek(start)
                found.append(memory.read(end - start) or b"")
    return b"".join(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read the memory of pid 1, which is not dumpable")
def test_S06_no_memory_of_the_helpers_holds_a_value() -> None:
    argument = "an-argument-that-is-in-the-blob"
    program = ["sh", "-c", "echo; sleep 60; true", argument]
    with nsbox.Sandbox(secrets=[VARIABLE, OTHER, nsbox.Secret("FILE", value=b"value in a file")]) as box:
        process = box.popen(program)
        next(process.output())
        parents = {pid: _parent(pid) for pid in box.processes()}
        init = box.processes()[0]
        # Another watcher may wait for the next command already.
        watchers = [pid for pid, parent in parents.items() if parent == init]
        (payload,) = (pid for pid, parent in parents.items() if parent in watchers)
        watcher = parents[payload]
        assert argument.encode() in _memory(watcher), "the positive control"
        assert VALUE.encode() in _memory(payload), "the positive control"
        for pid in (init, *watchers, _parent(init)):
            for value in (VALUE.encode(), b"value of the other", b"value in a file"):
                # The payload may have its processor before the watcher that wipes after the exec has.
                assert until(lambda pid=pid, value=value: value not in _memory(pid), 10)  # type: ignore[misc]
        process.kill()
        process.wait(20)


def _parent(pid: int) -> int:
    """0 for a process that has ended meanwhile."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def test_S01_environ_of_pid_1_is_empty() -> None:
    script = "cat /proc/1/environ; echo; tr '\\0' '\\n' < /proc/$$/environ | grep -c ^TOKEN="
    result = nsbox.run(["sh", "-c", script], secrets=[VARIABLE])
    assert result.stdout == b"\n1\n"


SCAN = """
import functools, gc, os, time, nsbox
from nsbox import janitor

half = os.urandom(8).hex()

def holders():
    "What of this process's memory that Python tracks leads to the value."
    found = set()
    for thing in gc.get_objects():
        for part in gc.get_referents(thing):
            for item in (part, *(part if type(part) is tuple else ())):
                text = item.encode("utf-8", "replace") if type(item) is str else item
                if type(text) is bytes and half.encode() * 2 in text:
                    found.add(type(thing).__name__)
    return found

@functools.lru_cache
def control(text):
    return 0

control(half * 2)
assert holders(), "the positive control"
control.cache_clear()
assert not holders(), holders()
for deliver in ("file", "env", "fd"):
    nsbox.run(["true"], secrets=[nsbox.Secret("A", value=(half * 2).encode(), deliver=deliver)])
    nsbox.run(["true"], secrets=[nsbox.Secret("A", call=lambda kept=half * 2: kept, deliver=deliver)])
    with nsbox.Sandbox(secrets=[nsbox.Secret("A", value=(half * 2).encode(), deliver=deliver, ttl=60)]) as box:
        box.run(["cat", "/run/secrets/A"], env={"B": "c"})
    del box
janitor.flush()
deadline = time.monotonic() + 10
while holders() and time.monotonic() < deadline:  # a thread that is about to end
    gc.collect()
assert not holders(), holders()
"""


def test_S06_no_cache_of_this_process_keeps_a_value() -> None:
    done = subprocess.run([sys.executable, "-c", SCAN], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ---- made ahead ---------------------------------------------------------------------------------------------------


def test_of_a_pool(blobs: list[bytes]) -> None:
    script = f"""{SAME}; test "$AS_VARIABLE" = 'value of a variable' && echo too; echo $A; ls /proc/self/fd | wc -l"""
    variable = nsbox.Secret("AS_VARIABLE", value=b"value of a variable", deliver="env")
    with nsbox.Pool(size=2, secrets=[TOKEN, OTHER, variable], env={"AS_VARIABLE": "of the spec", "A": "b"}) as pool:
        for _ in range(3):
            result = pool.run(["sh"], stdin=script)
            assert (result.stdout, result.stderr) == (b"same\ntoo\nb\n6\n", b"")
        assert pool.run(["sh", "-c", "echo $AS_VARIABLE"], env={"AS_VARIABLE": "mine"}).stdout == b"mine\n"
        with nsbox.Sandbox.from_pool(pool) as box:
            assert box.run(["sh"], stdin=script).stdout == b"same\ntoo\nb\n6\n"
    assert len(blobs) >= 8
    assert not any(value in blob for blob in blobs for value in (VALUE.encode(), b"value of a variable"))


def test_S06_of_a_pool_the_time_begins_with_the_lease() -> None:
    with nsbox.Pool(size=1, secrets=[TOKEN._replace(ttl=1.0)]) as pool:
        time.sleep(1.2)
        assert pool.run(["sh", "-c", "cat <&3 | wc -c"]).stdout == f"{len(VALUE)}\n".encode()
        assert pool.run(["sh", "-c", "sleep 2; cat <&3 | wc -c"]).stdout == b"0\n"
