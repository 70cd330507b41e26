"""The template interpreter and what it forks: text that any Python from 3.9 on runs. Nothing of nsbox is imported here.

It is started by native/template.c with these descriptors: 3 the socket to the embedding process, 4 this text, 5 the
shared object of native/join.c, 6 what is to be known as JSON, 7 the plan of a sandbox, 8 the text of
nsbox.python_inside. It imports what is asked for, runs the job once as it will be run later, and forks itself once:
what serves from then on is single-threaded, whatever the libraries have started (OpenBLAS). It never runs code of a
caller.

    template --fork--> C1: joins the cgroups, enters the sandbox's namespaces --fork--> C2: gives everything up, waits

C1 ends at once and C2 becomes the template's child. Only then C2 goes on, for its parent-death signal is to mean the
template. See native/join.c for what is given up, and docs/theory.md, "Parked interpreters".
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import gc
import json
import os
import select
import struct
import sys
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

Data = dict[str, Any]

SOCKET, LIBRARY, CONFIG, PLAN, INSIDE = 3, 5, 6, 7, 8
HELD_MS = 20  # between two looks at who has ended and cannot be reaped yet
MESSAGE = struct.Struct("=IIIiii5q20Q")  # struct nsb_msg


def read_all(fd: int | str) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


if TYPE_CHECKING:
    from nsbox import python_inside as inside
else:
    inside = types.ModuleType("nsbox-inside")
    inside.__file__ = __file__
    if __name__ == "nsbox-template":
        exec(compile(read_all(INSIDE), __file__, "exec"), inside.__dict__)


# ---- in the sandbox: becoming what waits there ----


def fresh_state(config: Data, generators: list[Any]) -> None:
    """What must differ from one fork to the next, beyond what os.fork() itself does (random, ssl, locks)."""
    os.environ.clear()
    os.environ.update(config["env"])
    sys.argv = ["-c"]
    getattr(sys.stdout, "reconfigure")(line_buffering=True)  # noqa: B009 - for mypy
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed()
    for generator in generators:
        generator.state = type(generator)().state
    uuid = sys.modules.get("uuid")
    if uuid is not None:
        vars(uuid)["_last_timestamp"] = None
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)


def inhabit(
    config: Data, library: ctypes.PyDLL, plan: bytes, generators: list[Any], go: int, fds: Sequence[int]
) -> None:
    """C2, inside. It has every capability over the sandbox, and reads nothing of anybody until it has none."""
    answer, out, err = fds
    try:
        if os.read(go, 1) != b"g":
            os._exit(1)
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.dup2(answer, inside.ANSWER, False)
        stage = ctypes.c_uint32()
        ret = library.nsb_confine(plan, len(plan), ctypes.byref(stage))
        if ret < 0:
            inside.reply(inside.ANSWER, {"failed": [stage.value, ret]}, 1 << 16)
            os._exit(1)
        os.chdir(config["cwd"])
        fresh_state(config, generators)
        inside.rehearse(config["warm"])
        sys.path.insert(0, "")  # last: what is there may be another lease's, and nobody has this one yet
        gc.enable()
        inside.reply(inside.ANSWER, {"ready": os.getpid()}, 1 << 16)
        inside.serve(config["most"])
    except BaseException as error:
        try:
            inside.reply(inside.ANSWER, {"failed": inside.describe(error)["traceback"]}, 1 << 16)
        except BaseException:
            pass
    os._exit(0)


# ---- outside: the template ----


def shared_memory() -> str:
    """What this process has mapped and its forks could write to for each other; empty when there is none. The mark `sh`
    stands only where the mapping is shared and its file was opened for writing (mmap(2), proc_pid_smaps(5))."""
    name = ""
    for line in read_all("/proc/self/smaps").decode("utf-8", "replace").splitlines():
        word, _, rest = line.partition(" ")
        if not word.endswith(":"):
            name = rest.split(None, 4)[-1]
        elif word == "VmFlags:" and "sh" in rest.split():
            return name
    return ""


class Template:
    def __init__(self) -> None:
        self.config = json.loads(read_all(CONFIG))
        self.plan = read_all(PLAN)
        self.library = ctypes.PyDLL(f"/proc/self/fd/{LIBRARY}")
        os.close(LIBRARY)
        for name in ("nsb_adopt", "nsb_fork", "nsb_enter", "nsb_confine"):
            getattr(self.library, name).restype = ctypes.c_long
        self.library.nsb_enter.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32]
        self.library.nsb_confine.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_void_p]
        self.socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, SOCKET)
        self.generators: list[Any] = []
        self.children: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, socket of whoever wants to know)
        self.held: set[int] = set()  # those of them that have ended and cannot be reaped yet
        self.poll = select.poll()

    def tell(self, answer: Data) -> None:
        self.socket.send(json.dumps(answer).encode("utf-8", "surrogatepass")[:60000])

    def prepare(self) -> None:
        """Import and warm up; then go on in a fork that has one thread."""
        for name in self.config["preload"]:
            __import__(name)
        for _ in range(2):
            for answer in inside.rehearse(self.config["warm"]):
                if "exception" in answer:
                    raise RuntimeError("warm_up: " + answer["exception"]["traceback"])
        numpy = sys.modules.get("numpy")
        if numpy is not None and hasattr(numpy, "random"):
            kind = numpy.random.BitGenerator
            self.generators = [item for item in gc.get_objects() if isinstance(item, kind)]
        gc.collect()
        gc.disable()
        gc.freeze()
        if os.fork():
            os._exit(0)
        if len(os.listdir("/proc/self/task")) != 1:
            raise RuntimeError("a preloaded module starts threads again after a fork; leave it out of preload")
        shared = shared_memory()
        if shared:
            raise RuntimeError(f"a preloaded module has memory that all forks would share ({shared}); leave it out")
        ret = self.library.nsb_adopt()
        if ret < 0:
            raise OSError(-ret, os.strerror(-ret))

    def serve(self) -> None:
        self.poll.register(SOCKET, select.POLLIN)
        while True:
            for fd, _ in self.poll.poll(HELD_MS if self.held else None):
                if fd == SOCKET:
                    self.request()
                else:
                    self.reap(fd)
            for fd in list(self.held):
                self.reap(fd)

    def request(self) -> None:
        size = 32 * 4
        data, beside, flags, _ = self.socket.recvmsg(64, _socket.CMSG_SPACE(size), _socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        fds = [fd for _, _, raw in beside for fd in struct.unpack(f"={len(raw) // 4}i", raw)]
        control = fds[1] if len(fds) > 1 else -1
        try:
            if flags & _socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            pid = self.fork_into(fds, bool(data[0]))
        except OSError as error:
            self.say(control, "failed", self.config["clone"], -(error.errno or 5))
            pid = 0
        for fd in fds:
            if fd != control or not pid:
                os.close(fd)
        if pid:
            self.watch(pid, control)

    def fork_into(self, fds: Sequence[int], into: bool) -> int:
        """C1 and C2; the latter's pid. fds: the sandbox's init, who wants to know, then C2's own, then cgroups, of
        which the first is one of version 2 if ``into``."""
        report = told = go = start = -1
        try:
            report, told = os.pipe()
            go, start = os.pipe()
            first = self.fork(fds[5]) if into else os.fork()
            if first == 0:
                self.enter(fds, fds[5 + into :], told, go, (report, start))
            os.close(told)
            told = -1
            answer = os.read(report, 8)
            os.waitpid(first, 0)
            pid: int
            pid, err = struct.unpack("=ii", answer) if len(answer) == 8 else (0, -5)
            if err < 0:
                raise OSError(-err, os.strerror(-err))
            os.write(start, b"g")
            return pid
        finally:
            for fd in (report, told, go, start):
                if fd >= 0:
                    os.close(fd)

    def fork(self, cgroup: int) -> int:
        """os.fork() into a cgroup."""
        ctypes.pythonapi.PyOS_BeforeFork()
        pid = int(self.library.nsb_fork(cgroup))
        if pid == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            return 0
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def enter(self, fds: Sequence[int], cgroups: Sequence[int], told: int, go: int, unused: Sequence[int]) -> None:
        """C1. Never returns."""
        try:
            for fd in unused:
                os.close(fd)
            groups = (ctypes.c_int * len(cgroups))(*cgroups)
            ret = self.library.nsb_enter(fds[0], self.config["namespaces"], groups, len(groups))
            pid = os.fork() if ret == 0 else 0
            if pid == 0 and ret == 0:
                self.socket.detach()
                os.close(told)  # whoever waits for C1's word sees its end, if it is killed before it says anything
                inhabit(self.config, self.library, self.plan, self.generators, go, fds[2:5])
            os.write(told, struct.pack("=ii", pid, ret))
        except OSError as error:
            os.write(told, struct.pack("=ii", 0, -(error.errno or 5)))
        finally:
            os._exit(0)

    def watch(self, pid: int, control: int) -> None:
        fd = os.pidfd_open(pid)
        self.children[fd] = (pid, control)
        self.poll.register(fd, select.POLLIN)
        self.say(control, "started", pid=pid)

    def reap(self, fd: int) -> None:
        pid, control = self.children[fd]
        found, status, used = os.wait4(pid, os.WNOHANG)
        if fd not in self.held:
            self.poll.unregister(fd)
        if not found:
            # Somebody inside traces it, and has it as long as he likes (ptrace(2)): until his sandbox ends.
            if fd not in self.held:
                self.held.add(fd)
                self.say(control, "exited", status=9)
            return
        self.held.discard(fd)
        del self.children[fd]
        os.close(fd)
        usage = (int(used.ru_utime * 1e6), int(used.ru_stime * 1e6), used.ru_maxrss, used.ru_inblock, used.ru_oublock)
        self.say(control, "exited", status=status, usage=usage)
        self.say(control, "ended", status=status, usage=usage)
        os.close(control)

    def say(
        self,
        control: int,
        kind: str,
        stage: int = 0,
        err: int = 0,
        status: int = 0,
        pid: int = 0,
        usage: Sequence[int] = (0, 0, 0, 0, 0),
    ) -> None:
        number = self.config["messages"][kind]
        try:
            os.write(control, MESSAGE.pack(number, stage, 0xFFFFFFFF, err, status, pid, *usage, *[0] * 20))
        except OSError:
            pass


def main() -> None:
    template = None
    try:
        template = Template()
        template.prepare()
        template.tell({"ready": sys.version.split()[0], "pid": os.getpid()})
        template.serve()
    except BaseException as error:
        if template is None:
            raise
        try:
            template.tell({"failed": inside.describe(error)["traceback"]})
        finally:
            os._exit(1)


if __name__ == "nsbox-template":
    main()
