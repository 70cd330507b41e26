"""PythonPool: interpreters that wait in sandboxes of their own."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import nsbox
from nsbox import janitor
from nsbox.errors import NsboxError, SandboxUnavailable, SpecError

numpy_missing = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import numpy"], capture_output=True).returncode != 0,
    reason="numpy is not installed",
)


@pytest.fixture(scope="module", autouse=True)
def gateway_thread(helper_process: None) -> None:
    """The gateway's thread, which the library keeps once it was needed, is there before a test is looked at."""
    nsbox.run(["true"], net="filtered", allow=["example.org"])
    janitor.flush()


def pool(**options: Any) -> nsbox.PythonPool:
    return nsbox.PythonPool(**{"size": 1, **options})


@pytest.mark.parametrize("warm_up", ["list(range(100000))", f"text = {'x' * 400_000!r}"])
def test_a_warm_up_may_be_long_and_say_much(warm_up: str) -> None:
    with pool(warm_up=warm_up) as p:
        assert p.run("1 + 1").value == 2


def test_value_streams_inputs_and_files() -> None:
    with pool() as p:
        code = "import sys\nprint(name)\nprint('no', file=sys.stderr)\nopen('a/b').read() + open('/tmp/c').read()"
        result = p.run(code, inputs={"name": "Ann"}, files={"a/b": "text ", "/tmp/c": b"bytes"})
    assert result.ok
    assert (result.value, result.value_error, result.exception) == ("text bytes", None, None)
    assert (result.stdout_text, result.stderr_text) == ("Ann\n", "no\n")
    assert result.argv[-1] == code
    assert result.timing["run_ms"] > 0
    assert json.loads(result.to_json())["value"] == "text bytes"


def test_an_exception_comes_as_text_with_the_frames_of_the_code() -> None:
    with pool() as p:
        result = p.run("def f():\n    return {}['key']\nf()")
    assert result.exit_code == 1
    assert result.exception is not None
    assert (result.exception.type, result.exception.message) == ("KeyError", "'key'")
    assert "return {}['key']" in result.exception.traceback
    assert "nsbox" not in result.exception.traceback


@pytest.mark.parametrize(
    ("code", "exit_code", "ended_by"),
    [
        ("import sys; sys.exit(7)", 7, None),
        ("import sys; sys.exit('words')", 1, None),
        ("import os; os._exit(9)", 9, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", None, signal.SIGSEGV),
        ("def f(:", 1, None),
    ],
)
def test_how_it_ends(code: str, exit_code: int | None, ended_by: int | None) -> None:
    with pool() as p:
        result = p.run(code)
    assert (result.exit_code, result.signal) == (exit_code, ended_by)
    assert not result.ok


def test_a_value_that_is_not_json_is_told() -> None:
    with pool() as p:
        result = p.run("object()")
        large = p.run("'x' * (17 << 20)")
    assert result.ok
    assert result.value is None
    assert result.value_error is not None
    assert "object" in result.value_error
    assert large.value is None
    assert large.value_error is not None
    assert "may come back" in large.value_error


def test_every_lease_is_a_sandbox_that_nobody_used() -> None:
    code = (
        "import os, random, uuid\nseen = os.path.exists('/tmp/left')\nopen('/tmp/left', 'w').close()\n"
        "left = globals().get('left'); left = 1\n[seen, random.random(), str(uuid.uuid4())]"
    )
    with pool() as p:
        found = [p.run(code) for _ in range(4)]
    assert [result.value[0] for result in found] == [False] * 4
    assert len({result.value[1] for result in found}) == 4
    assert len({result.value[2] for result in found}) == 4
    assert len({result.id for result in found}) == 4
    assert len({result.lease["init_pid"] for result in found}) == 4


@numpy_missing
def test_numpy_is_there_and_draws_other_numbers_each_time() -> None:
    code = "import sys\nloaded = 'numpy' in sys.modules\nimport numpy\n"
    code += "[loaded, float(numpy.random.rand()), (numpy.ones((200, 200)) @ numpy.ones((200, 200))).sum()]"
    with pool(preload=["numpy"]) as p:
        found = [p.run(code).value for _ in range(3)]
    assert [value[0] for value in found] == [True] * 3
    assert [value[2] for value in found] == [8e6] * 3
    assert len({value[1] for value in found}) == 3


def test_time_limit() -> None:
    with pool() as p:
        result = p.run("print('begun')\nwhile True: pass", timeout=0.3)
    assert result.reason == "timeout"
    assert result.limits_hit[0]["limit"] == "timeout"
    assert result.stdout == b"begun\n"


def test_processor_time_limit() -> None:
    with pool(cpu_time=0.5, timeout=20) as p:
        assert p.run("while True: pass").reason == "cpu_time"


def test_memory_limit_ends_it_and_is_named() -> None:
    with pool(memory="100M", timeout=20) as p:
        result = p.run("kept = []\nwhile True: kept.append(b'x' * (1 << 20))")
    assert result.exception is not None or result.reason == "memory"
    if result.exception is not None:  # a limit on the address space comes first where memory is watched
        assert result.exception.type == "MemoryError"


def test_memory_of_a_child_counts() -> None:
    code = (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'kept = bytearray(90 << 20); kept2 = bytearray("
    )
    code += "90 << 20); import time; time.sleep(20)'])"
    with pool(memory="120M", timeout=20) as p:
        result = p.run(code)
    assert result.reason in ("memory", "exited")
    assert result.reason == "memory" or result.timing["run_ms"] < 15000


def test_output_limit() -> None:
    with pool(output="1000") as p:
        result = p.run("print('x' * 5000)")
    assert len(result.stdout) == 1000
    assert result.stdout_truncated
    assert [hit["limit"] for hit in result.limits_hit] == ["output"]


def test_a_fork_bomb_ends_with_its_sandbox() -> None:
    code = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    with pool(pids=30, timeout=1) as p:
        result = p.run(code)
    assert result.reason in ("timeout", "pids")


def test_what_is_left_running_ends_with_it() -> None:
    with pool() as p:
        result = p.run("import subprocess\nsubprocess.Popen(['sleep', '1000']).pid")
        assert result.ok
        deadline = time.monotonic() + 5
        while _alive(result.lease["init_pid"]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _alive(result.lease["init_pid"])


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    "lie",
    [
        "b'\\xff' * 8 + b'x'",
        "(4).to_bytes(8, 'little') + b'junk'",
        "(2).to_bytes(8, 'little') + b'[]'",
        "(2).to_bytes(8, 'little') + b'{}' + b'more'",
        "(20000).to_bytes(8, 'little') + b'[' * 20000",
    ],
)
def test_a_reply_that_is_none_is_trouble_and_no_more(lie: str) -> None:
    with pool() as p:
        result = p.run(f"import os, time\nos.write(3, {lie})\ntime.sleep(20)", timeout=10)
        assert result.reason == "error"
        assert result.value is None
        assert result.value_error is not None
        assert p.run("1").value == 1


def test_a_reply_of_its_own_making_is_just_data() -> None:
    said = json.dumps({"value": {"__reduce__": ["os.system", "true"]}, "exit": "no", "exception": 7, "other": [1]})
    with pool() as p:
        result = p.run(
            f"import os, time\nd = {said!r}.encode()\nos.write(3, len(d).to_bytes(8, 'little') + d)\ntime.sleep(9)"
        )
    assert result.value == {"__reduce__": ["os.system", "true"]}
    assert result.exception is None


def test_a_closed_socket_is_an_end() -> None:
    with pool() as p:
        result = p.run("import os\nos.closerange(3, 100)\nprint('on')")
    assert result.stdout == b"on\n"
    assert result.value is None


@pytest.mark.parametrize("name", ["answer", "control"])
def test_a_session_whose_other_end_is_gone_does_not_run(name: str) -> None:
    with pool() as p, p.session() as session:
        assert session.is_running
        session._lease.interpreter.close_stream(name)
        assert not session.is_running


def test_session_keeps_variables_and_ends() -> None:
    with pool() as p:
        with p.session() as session:
            assert session.run("a = 20\nimport math").ok
            assert session.run("a + 1").value == 21
            assert session.run("1/0").exception is not None
            assert session.run("print(a); math.floor(a / 3)").value == 6
            identity = session.id
        with pytest.raises(SandboxUnavailable, match="ended"):
            session.run("a")
        with p.session() as other:
            assert other.run("'a' in globals()").value is False
            assert other.id != identity


def test_a_limit_ends_a_session() -> None:
    with pool() as p, p.session() as session:
        assert session.run("1").value == 1
        assert session.run("import time; time.sleep(9)", timeout=0.2).reason == "timeout"
        assert not session.is_running
        with pytest.raises(SandboxUnavailable):
            session.run("1")


def test_each_lease_is_in_the_boundary_log_like_a_run() -> None:
    events: list[dict[str, Any]] = []
    with pool(log=events.append) as p:
        p.run("1")
        p.run("1/0")
        with p.session() as session:
            session.run("2")
    kinds = [event["event"] for event in events]
    assert kinds.count("sandbox.start") == kinds.count("sandbox.end") == 3
    assert kinds.count("command") == 1
    assert len({event["sandbox"] for event in events}) == 3


def test_secrets_are_there_and_never_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSBOX_TEST_TOKEN", "tok-0123456789abcdef")
    with pool(secrets=["token=env:NSBOX_TEST_TOKEN"], secret_env=True) as p:
        result = p.run(
            "import os\nkey = open('/run/secrets/token').read()\nprint(key)\n[len(key), key, os.environ['token']]"
        )
    assert result.value[0] == 20
    assert "0123456789" not in json.dumps(result.to_dict())


def test_a_workspace_is_applied(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("1")
    tmp_path.chmod(0o755)
    with pool(workspace=f"{tmp_path}:/w", apply=True) as p:
        result = p.run("open('new', 'w').write(open('old').read() + '2')")
    assert result.ok, result.exception
    assert (tmp_path / "new").read_text() == "12"
    assert [entry["path"] for entry in result.boundary["outputs"]] == ["new"]


def test_denied_egress_is_told() -> None:
    code = "import socket\ns = socket.socket()\ns.settimeout(3)\n"
    code += "try:\n    s.connect(('192.0.2.1', 80))\nexcept OSError:\n    pass"
    with pool(net="filtered", allow=["192.0.2.7:80"]) as p:
        result = p.run(code)
    denied = [entry for entry in result.boundary["destinations"] if entry["verdict"] == "denied"]
    assert [entry["address"] for entry in denied] == ["192.0.2.1"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preload": ["no_such_module_xyz"]}, "no_such_module_xyz"),
        ({"preload": "json"}, "list of modules"),
        ({"python": "/usr/bin/true"}, "interpreter"),
        ({"python": "/nonexistent/python3"}, "not a program"),
        ({"root": "/nonexistent"}, "root"),
        ({"subids": True}, "subids"),
        ({"warm_up": "1/0"}, "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        pool(**options)


def test_inputs_that_are_not_json_are_refused() -> None:
    with pool() as p:
        with pytest.raises(SpecError, match="JSON"):
            p.run("x", inputs={"x": object()})
        with pytest.raises(SpecError, match="text"):
            p.run(b"x")  # type: ignore[arg-type]


def test_a_session_applies_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pool(workspace=f"{tmp_path}:/w", apply=True) as p, pytest.raises(SpecError, match="session"):
        p.session()


def test_a_session_that_is_forgotten_is_told() -> None:
    with pool() as p:
        session = p.session()
        with pytest.warns(ResourceWarning, match=session.id):
            del session


def test_another_interpreter() -> None:
    with pool(python="/usr/bin/python3") as p:
        assert p.run("import sys\nsys.executable").value == "/usr/bin/python3"


def test_a_closed_pool_refuses() -> None:
    p = pool()
    p.close()
    p.close()
    with pytest.raises(SandboxUnavailable, match="closed"):
        p.run("1")


def test_a_template_that_dies_is_replaced() -> None:
    with pool() as p:
        assert p.wait_full()
        template = p._templates.current
        assert template is not None
        os.kill(template.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while template.is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        assert p.run("6 * 7").value == 42
        assert p._templates.current is not template


def test_the_template_has_nothing_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSBOX_TEST_MARK", "a-mark-of-the-caller")
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    try:
        with pool() as p:
            template = p._templates.current
            assert template is not None
            assert b"a-mark-of-the-caller" not in Path(f"/proc/{template.pid}/environ").read_bytes()
            held = {os.readlink(f"/proc/{template.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{template.pid}/fd")}
            assert os.readlink(f"/proc/self/fd/{writer}") not in held
            assert os.listdir(f"/proc/{template.pid}/task") == [str(template.pid)]
    finally:
        os.close(reader)
        os.close(writer)


def test_a_forked_child_has_no_part_in_it() -> None:
    with pool() as p:
        child = os.fork()
        if child == 0:
            try:
                p.run("1")
            except SandboxUnavailable:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert p.run("2").value == 2


def test_a_forked_child_has_no_part_in_a_session(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pool(log=str(log)) as p, p.session() as session:
        pid = os.fork()
        if pid == 0:
            running = session.is_running
            session.close()
            os._exit(running)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert session.run("1").value == 1
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events.count("sandbox.end") == 1


def test_a_child_forked_while_a_thread_asks_the_template_goes_on() -> None:
    with pool() as p:
        template = p._templates.current
        assert template is not None
        with template._lock:
            pid = os.fork()
            if pid == 0:
                os._exit(7)
        fd = os.pidfd_open(pid)
        ended = select.select([fd], [], [], 20)[0]
        os.close(fd)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_many_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with pool(size=2) as p, ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda number: p.run(f"{number} * 2").value, range(12)))
    assert found == [number * 2 for number in range(12)]


GUIDE = (Path(__file__).parents[2] / "docs/guides/python-pool.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL))
def test_the_guide_tells_the_truth(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_nothing_outlives_a_killed_process() -> None:
    code = (
        "import nsbox, time\npool = nsbox.PythonPool(size=2)\npool.wait_full()\n"
        "found = [pid for _, lease in pool._stock._ready for pid in lease.interpreter.roots]\n"
        "print(pool._templates.current.pid, *found, flush=True)\ntime.sleep(100)"
    )
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    pids = [int(word) for word in started.stdout.readline().split()]
    assert len(pids) == 5
    assert all(map(_alive, pids))
    started.kill()
    started.wait()
    started.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(_alive, pids))


def test_a_killed_template_takes_its_forks_along() -> None:
    with pool() as p:
        assert p.wait_full()
        lease = p._stock.take()
        assert lease.template is not None
        os.kill(lease.template.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while _alive(lease.interpreter.inside) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _alive(lease.interpreter.inside)
        p._discard(lease)


def test_a_changed_folder_of_packages_makes_another_template(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "own")], check=True)
    with pool(python=str(tmp_path / "own/bin/python")) as p:
        assert p.run("1").value == 1
        before = p._templates.current
        (folder,) = (tmp_path / "own/lib").glob("python3*/site-packages")
        (folder / "added_later.py").write_text("here = True\n")
        p.run("1")
        assert p.wait_full()
        assert p._templates.current is not before
        assert p.run("import added_later\nadded_later.here").value is True


def test_a_folder_that_this_process_alone_imports_from_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    out = tmp_path / "out"
    out.mkdir(mode=0o777)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend("/nonexistent")  # not the first, which is the script's
    with pool(rw=[str(out)]) as p:
        assert p.run(f"open('{out}/file', 'w').write('text')").value == 4
    assert (out / "file").read_text() == "text"


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"rw": ["work"]}, True),  # the folder above can be renamed, and another put in its place
        ({"rw": ["work/proj:/elsewhere"]}, True),
        ({"rw": ["link"]}, True),
        ({"rw": ["work/proj/own"]}, True),
        ({"rw": ["work/proj/own/lib"]}, True),
        ({"workspace": "work/proj", "apply": True}, True),
        ({"rw": ["work/proj/sources"]}, True),  # of an editable installation
        ({"rw": ["work/proj"]}, False),
        ({"workspace": "work/proj"}, False),
        ({"rw": ["work/proj/out"]}, False),
    ],
    ids=str,
)
def test_nobody_writes_what_the_template_loads(tmp_path: Path, options: dict[str, Any], refused: bool) -> None:
    own = tmp_path / "work/proj/own"
    for folder in ("work/proj/sources", "work/proj/out"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "work/proj")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(own)], check=True)
    (packages,) = own.glob("lib/python3*/site-packages")
    (packages / "editable.pth").write_text(f"{tmp_path / 'work/proj/sources'}\n")
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)

    def there(value: Any) -> Any:
        return [there(item) for item in value] if isinstance(value, list) else f"{tmp_path}/{value}"

    given = {name: value if value is True else there(value) for name, value in options.items()}
    if refused:
        with pytest.raises(SpecError, match="outside of any sandbox"):
            pool(python=str(own / "bin/python"), **given)
        return
    code = (
        "import os\n"
        f"try:\n    os.rename({str(own)!r}, {str(own)!r} + '2')\n"
        "except OSError as error:\n    print(error.strerror)\n"
        f"os.access({str(packages)!r}, os.W_OK)\n"
    )
    with pool(python=str(own / "bin/python"), **given) as p:
        result = p.run(code)
    assert (result.value, bool(result.stdout)) == (False, True), result
    assert packages.is_dir()


def test_a_tracer_inside_cannot_hold_up_the_template() -> None:
    """A zombie is its tracer's (ptrace(2)): whoever waits for it waits as long as that one likes."""
    code = (
        "import ctypes, os, time\n"
        "libc, main, (there, told) = ctypes.CDLL(None), os.getpid(), os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.write(told, b'%d' % libc.ptrace(0x4206, main, None, None))\n"  # PTRACE_SEIZE
        "    time.sleep(60)\n"
        "print(os.read(there, 9).decode(), flush=True)\n"
        "os._exit(3)\n"
    )
    with pool(seccomp="permissive", timeout=20) as p:
        result = p.run(code)
        assert result.stdout == b"0\n"
        assert result.reason in ("signaled", "exited"), result
        assert p.run("1").value == 1


def test_nothing_of_the_workspace_runs_before_the_lease(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("import sys\nsys.stderr.write('planted')\n")
    tmp_path.chmod(0o755)
    warm_up = "try:\n    import planted\nexcept ImportError:\n    pass\n"
    with pool(workspace=str(tmp_path), warm_up=warm_up) as p:
        result = p.run("import sys\nbefore = 'planted' in sys.modules\nimport planted\nbefore")
    assert (result.value, result.stderr) == (False, b"planted"), result.exception


@pytest.mark.parametrize("protection", ["PROT_READ | mmap.PROT_WRITE", "PROT_READ"])
def test_memory_that_all_forks_would_share_is_refused(protection: str) -> None:
    warm_up = f"import mmap, sys\nsys.kept = mmap.mmap(-1, 4096, prot=mmap.{protection})\n"
    with pytest.raises(SpecError, match="memory that all forks would share"):
        pool(warm_up=warm_up)


def test_a_template_without_descriptors_refuses_and_goes_on() -> None:
    warm_up = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))\n"
    with pool(warm_up=warm_up, when_empty="error") as p:
        template = p._templates.current
        assert template is not None
        leases: list[Any] = []
        with pytest.raises(NsboxError, match="Too many open files"):
            leases.extend(p._make() for _ in range(24))
        assert leases
        assert template.is_alive
        for lease in leases:
            p._discard(lease)
        janitor.flush()
