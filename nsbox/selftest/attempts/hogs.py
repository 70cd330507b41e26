"""Attempts to take more than a limit allows. Each says how far it came; what follows the colon is how far it tries."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

from .calls import TOLD

NOTICED_S = 1.0  #: what is taken is kept so long: a limit that is watched takes a moment to be noticed


def memory(text: str) -> object:
    """TEXT mebibytes, touched and kept for a moment."""
    held = []
    for _ in range(int(text)):
        held.append(bytearray(b"x" * (1 << 20)))
    time.sleep(NOTICED_S)
    return f"took {len(held)}"


def processes(text: str) -> object:
    """TEXT processes that stay."""
    made: list[int] = []
    while len(made) < int(text):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            signal.pause()
        made.append(pid)
    time.sleep(NOTICED_S)
    for pid in made:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return f"took {len(made)}"


def disk(text: str) -> object:
    """TEXT mebibytes in a file, which is left there."""
    place, written = f"{os.environ.get('TMPDIR', '/tmp')}/hog-{os.getpid()}", 0
    block = b"x" * (1 << 20)
    try:
        with open(place, "wb", buffering=0) as file:
            while written < int(text) << 20:
                done = file.write(block)
                if not done:
                    break
                written += done
    except OSError:
        pass
    return f"took {written >> 20}"


def inodes(text: str) -> object:
    """TEXT empty files, which are left there."""
    folder = f"{os.environ.get('TMPDIR', '/tmp')}/hog-{os.getpid()}"
    os.mkdir(folder)
    made = 0
    try:
        while made < int(text):
            os.close(os.open(f"{folder}/{made}", os.O_WRONLY | os.O_CREAT, 0o600))
            made += 1
    except OSError:
        pass
    return f"took {made}"


def descriptors(text: str) -> object:
    """TEXT open descriptors, with the limit raised as far as it goes."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: list[int] = []
    try:
        while len(held) < int(text):
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    return f"took {len(held)}"


def output(text: str) -> object:
    """TEXT mebibytes without an end of line."""
    block = b"\0" * (1 << 20)
    for _ in range(int(text)):
        sys.stdout.buffer.write(block)
    sys.stdout.flush()
    return "said all"


def busy(text: str) -> object:
    """A loop of TEXT seconds of processor time."""
    while time.process_time() < float(text):
        pass
    return f"took {text}"


def sleep(text: str) -> object:
    """Nothing at all, for TEXT seconds."""
    print("began", flush=True)
    time.sleep(float(text))
    return f"took {text}"


def stay(text: str) -> object:
    """A daemon: forked twice, a session of its own, deaf to signals, with TEXT as its name in the process table."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGALRM):
                signal.signal(number, signal.SIG_IGN)
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(20)", text])
        os._exit(0)
    time.sleep(0.2)
    return "done"


TOLD.update(
    {
        "hog_memory": memory,
        "hog_processes": processes,
        "hog_disk": disk,
        "hog_inodes": inodes,
        "hog_descriptors": descriptors,
        "hog_output": output,
        "hog_processor": busy,
        "hog_time": sleep,
        "stay": stay,
    }
)
