"""First inputs for the fuzzers, made by the library's own encoder, so that they follow every change of the layout."""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from nsbox import Spec
from nsbox._native import ffi, lib
from nsbox.encode import Ids, command, command_blob, launch_blob, waiting
from nsbox.launch import prepare

MESSAGE = ffi.sizeof("struct nsb_msg")
REQUEST = ffi.sizeof("struct nsb_request")
# (type, descriptors, size or 0 for a whole message, err)
Step = tuple[int, int, int, int]
GO: Step = (lib.NSB_MSG_GO, 0, 0, 0)


def harnessed(script: bytes, steps: list[Step], blob: bytes, repair: bool = True) -> bytes:
    """An input of launch.c and control.c: see harness.h."""
    rows = b"".join(struct.pack("=BBBb", *step) for step in steps)
    return struct.pack("=H", len(script)) + script + bytes([len(steps)]) + rows + bytes([repair]) + blob


def commands() -> Iterator[tuple[bytes, int]]:
    """Blobs for NSB_MSG_RUN, and the descriptors that each wants beside the blob's own."""
    argv, env = ["sh", "-c", "exit $X", ""], {"PATH": "/usr/bin::/bin", "X": "1"}
    yield command_blob(command(argv, env, "/tmp")), 3
    yield command_blob(command(["/bin/true"], {}, "", lib.NSB_STDIN | lib.NSB_KEEP)), 4
    yield command_blob(command(["vi"], env, "/", lib.NSB_TTY)._replace(detail=24 << 16 | 80)), 3
    yield command_blob(command(["-"], {}, "/", lib.NSB_CONNECT)._replace(detail=8080)), 3
    most = command(["ls"], env, "/", lib.NSB_STDIN)._replace(n_join=lib.NSB_MAX_JOIN, n_give=lib.NSB_MAX_GIVE)
    yield command_blob(most), 4 + lib.NSB_MAX_JOIN + lib.NSB_MAX_GIVE
    yield command_blob(command(["ls"], env, "/")._replace(n_variables=2, n_give=1)), 5


def control() -> Iterator[bytes]:
    """What init is told: a command, and then other things."""
    signals = [(lib.NSB_MSG_SIGNAL, 0, 0, 15), (lib.NSB_MSG_SIGNAL, 1, 0, 2), (lib.NSB_MSG_KILL, 0, 0, 0), GO]
    for blob, count in commands():
        for script in (b"", b"\0\1", b"\0\0\0\0\0\0\0\0\1\1", bytes(range(40)), bytes(8) + b"\x08A=1\0B=2\0"):
            yield harnessed(script, [(lib.NSB_MSG_RUN, count + 1, 0, 0), *signals, (lib.NSB_MSG_KILL, 0, 9, 0)], blob)
            yield harnessed(script, [(lib.NSB_MSG_START, count - 2, 0, 0), *signals], blob)


def specs() -> Iterator[Spec]:
    """Sandboxes of several kinds."""
    yield Spec()
    yield Spec(net="none", workspace="/usr/share/doc", hostname="box", nice=5)
    yield Spec(ro=["/usr/include"], tmpfs=["/scratch"], memory="64M", cpus=1)
    yield Spec(allow=["example.org:443"])


IDS = Ids("0 100000 1000\n", "0 100000 1000\n", 0, 0, 1000, 1000, 100000, 100000, False)


def launches() -> Iterator[bytes]:
    """Requests for sandboxes, and how the system calls end."""
    what = command(["sh", "-c", "true"], {"PATH": "/usr/bin:/bin", "HOME": "/root"}, "/")
    for spec in specs():
        compiled = prepare(spec).compiled
        for program, flags in ((what, lib.NSB_PASS_ROOT), (waiting(), 0), (what, lib.NSB_SECRETS)):
            blob = launch_blob(compiled, program, IDS, flags)
            count = 4 + bool(flags & lib.NSB_SECRETS)
            for script in (b"", bytes(12) + b"\1", bytes([0, 0, 1] * 30), bytes(range(200))):
                steps = [(0, count, 0, 0), (0, 9, 1, 0), GO, GO, (lib.NSB_MSG_KILL, 0, 0, 0)]
                yield harnessed(script, steps, blob)


def requests() -> Iterator[bytes]:
    """Launches, and the other kinds of request."""
    yield from launches()
    yield harnessed(b"", [(0, 2, 0, lib.NSB_NEST)], b"")
    for blob, count in commands():
        for script in (b"", b"\0\1", b"\0\0\1"):
            yield harnessed(script, [(0, count + 1, 0, lib.NSB_TEMPLATE)], blob)


def received() -> Iterator[bytes]:
    """What the embedding process gets."""
    for kind in (lib.NSB_MSG_STARTED, lib.NSB_MSG_FAILED, lib.NSB_MSG_EXITED):
        message = ffi.new("struct nsb_msg *", {"type": kind})
        for room, count in ((2, 2), (0, 3), (5, 1), (40, 24), (40, 25)):
            yield bytes([room, count, MESSAGE // 2]) + bytes(ffi.buffer(message))
    yield bytes([1, 1, 4]) + bytes(8) + bytes([1, 1, 0])


TARGETS = {"launch": requests, "control": control, "receive": received}


def write(target: str, directory: Path) -> int:
    """Write the inputs of a target into a directory; how many there are."""
    inputs = [*TARGETS[target]()]
    for number, data in enumerate(inputs):
        (directory / f"seed-{number:03}").write_bytes(data)
    return len(inputs)


if __name__ == "__main__":
    print(write(sys.argv[1], Path(sys.argv[2])))
