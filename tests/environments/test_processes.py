"""nsbox in processes that are not a plain program: workers of any kind, a pool of threads, pid 1 of a container."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PREAMBLE = """
import ctypes, multiprocessing, os, sys, time
import nsbox

def job(number):
    result = nsbox.run(["sh", "-c", f"echo {number}; exit {number}"])
    return result.exit_code, result.stdout_text

def children():
    # What a worker leaves comes to this process, which reaps nothing by itself: as pid 1 of many a container.
    own, found = os.getpid(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                head, _, rest = file.read().rpartition(")")
        except OSError:
            continue
        if int(rest.split()[1]) == own:
            found.append(f"{head}) {rest.split()[0]}")
    return found

EXPECTED = [(n, f"{n}\\n") for n in range(6)]
"""


def answer(code: str, folder: Path, *around: str) -> str:
    """What a program printed that embeds nsbox; it must have succeeded."""
    file = folder / "embedder.py"
    file.write_text(PREAMBLE + textwrap.dedent(code))
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [*around, sys.executable, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_multiprocessing(method: str, tmp_path: Path) -> None:
    code = f"""
    if __name__ == "__main__":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
        job(0)  # so that a forked worker finds its parent's helper, and must not use it
        before = children()
        pool = multiprocessing.get_context({method!r}).Pool(2)
        assert pool.map(job, range(6), chunksize=1) == EXPECTED
        pool.close()
        pool.join()
        # Helpers of Python itself stay: the fork server, and the tracker of resources.
        def ours():
            return [child for child in children() if child not in before and "nsbox" in child]
        until = time.monotonic() + 20
        while (left := ours()) and time.monotonic() < until:
            time.sleep(0.05)
        print(left, job(1))
    """
    assert answer(code, tmp_path) == "[] (1, '1\\n')\n"


def test_threads_of_a_pool(tmp_path: Path) -> None:
    code = """
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            assert list(pool.map(job, range(6))) == EXPECTED
    print(sum("nsbox-zygote" in child for child in children()))
    """
    assert answer(code, tmp_path) == "1\n", "all threads share one helper"


def test_a_process_that_forks_and_leaves(tmp_path: Path) -> None:
    """The double fork of a daemon: without a terminal, with closed descriptors, its parent gone."""
    code = """
    reader, writer = os.pipe()
    job(0)
    if os.fork():
        os.wait()
        os.close(writer)
        print(os.read(reader, 100).decode(), end="", flush=True)
        sys.exit()
    os.setsid()
    if os.fork():
        os._exit(0)
    for fd in range(3):
        os.close(fd)
    os.chdir("/")
    os.write(writer, f"{job(3)}\\n".encode())
    """
    assert answer(code, tmp_path) == "(3, '3\\n')\n"


def test_a_handler_for_the_end_may_use_a_sandbox(tmp_path: Path) -> None:
    code = """
    import atexit
    box = nsbox.Sandbox()
    atexit.register(lambda: (print(box.run(["echo", "still here"]).stdout_text, end=""), box.close(), print(job(2))))
    job(1)
    """
    assert answer(code, tmp_path) == "still here\n(2, '2\\n')\n"


def test_a_worker_that_is_terminated_takes_its_sandbox_along(tmp_path: Path) -> None:
    code = """
    def sleep(mark, told):
        nsbox.run(["sh", "-c", f"echo up; sleep {mark}"], on_stdout=lambda _: told.set())

    def sleepers(mark):
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read().split(b"\\0")
            except OSError:
                continue
            found += [name] * (words[:2] == [b"sleep", mark.encode()])
        return found

    if __name__ == "__main__":
        context, mark = multiprocessing.get_context("spawn"), f"600.{time.time_ns()}"
        told = context.Event()
        worker = context.Process(target=sleep, args=(mark, told))
        worker.start()
        told.wait()
        while not sleepers(mark):
            time.sleep(0.01)
        worker.terminate()
        worker.join()
        while sleepers(mark):  # the test's own patience bounds it
            time.sleep(0.01)
        print(worker.exitcode)
    """
    assert answer(code, tmp_path) == "-15\n"


def test_as_pid_1(tmp_path: Path) -> None:
    """Python itself is pid 1, as in a container without an init; nothing is ever reaped but what nsbox reaps."""
    code = """
    assert os.getpid() == 1
    assert [job(n) for n in range(6)] == EXPECTED
    try:
        nsbox.run(["/nonexistent"])
    except nsbox.errors.CommandError:
        pass
    box = nsbox.Sandbox()
    with box:
        box.popen(["sleep", "60"])
    deadline = time.monotonic() + 5
    while (left := [child for child in children() if "nsbox-zygote" not in child]) and time.monotonic() < deadline:
        time.sleep(0.02)
    print(left)
    """
    first = "mounts" if os.geteuid() == 0 else "ordinary"
    outer = [sys.executable, str(HERE / "outer.py"), first, "pids", "--"]
    assert answer(code, tmp_path, *outer) == "[]\n"
