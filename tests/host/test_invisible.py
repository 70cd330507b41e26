"""Nothing of the host or of its caller shows inside. Each check first shows, outside, that there is something."""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nsbox


def out(*argv: str, **options: Any) -> str:
    """The output of a command that must succeed."""
    result = nsbox.run(argv, **options)
    assert result.ok, f"{result!r} {result.stderr_text[-1000:]}"
    return result.stdout_text


def python(code: str, **options: Any) -> str:
    """The output of Python code run inside."""
    return out("python3", "-c", textwrap.dedent(code), **options)


def here(code: str) -> str:
    """The output of the same code outside: the control."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    ).stdout


def fields(**options: Any) -> dict[str, str]:
    """/proc/self/status inside."""
    return dict(
        line.split(":\t", 1) for line in out("cat", "/proc/self/status", **options).splitlines() if ":\t" in line
    )


# Files


def test_home_directories() -> None:
    home = os.path.expanduser("~")
    assert os.listdir(home), "the control: there is something at home"
    assert out("sh", "-c", f"ls -A {home} 2>/dev/null; ls /home", uid=1000).split() == ["user"]
    assert out("sh", "-c", "ls -A /root; ls -A ~", uid=0) == ""


@pytest.mark.parametrize(
    "path",
    [
        "/etc/shadow",
        "/etc/ssh",
        "/etc/sudoers",
        "/etc/machine-id",
        "/etc/fstab",
        "/boot",
        "/var/lib/dpkg",
        "/var/log/dpkg.log",
        "/var/run/docker.sock",
        "/run/systemd",
        "/root/.bashrc",
        "/sys/kernel",
        "/lost+found",
        "/.dockerenv",
    ],
)
@pytest.mark.parametrize("uid", [0, 1000])
def test_files_of_the_host_s_administration(path: str, uid: int) -> None:
    if not os.path.lexists(path):
        pytest.skip(f"the control: this host has no {path}")
    assert nsbox.run(["ls", "-d", path], uid=uid).exit_code != 0


def test_the_caller_s_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    assert os.listdir("/tmp")
    assert out("sh", "-c", f"ls -A /tmp /var/tmp; ls {tmp_path} 2>/dev/null; true").split() == ["/tmp:", "/var/tmp:"]


def test_the_account_database_is_made_up() -> None:
    users = [line.split(":")[0] for line in out("cat", "/etc/passwd").splitlines()]
    assert users == ["root", "nobody", "user"]
    if Path("/etc/passwd").read_bytes().count(b"\n") <= 3:
        pytest.skip("the control: this host has hardly any accounts")


def test_mounts_name_nothing_of_the_caller(tmp_path: Path) -> None:
    # Of the library's own layers the kernel tells where they lie: an ordinary caller's are below its runtime directory.
    lines = out("cat", "/proc/self/mountinfo", "/proc/mounts").splitlines()
    mounts = "\n".join(line for line in lines if "/nsbox/skeleton-" not in line)
    with open("/proc/self/mountinfo") as file:
        assert "/sys" in file.read(), "the control"
    places = {line.split()[4] for line in mounts.splitlines() if " - " in line}
    assert not any(place.startswith(("/sys", "/home", "/root", "/tmp", "/var", "/run", "/boot")) for place in places), (
        places
    )
    assert os.path.expanduser("~") not in mounts
    assert str(tmp_path) not in mounts


def test_the_old_root_is_gone() -> None:
    code = """
    import os
    found = set()
    for name in os.listdir("/proc/self/fd"): pass
    os.chdir("/")
    for _ in range(50): os.chdir("..")
    print(sorted(os.listdir(".")) == sorted(os.listdir("/")))
    print(os.stat("/").st_ino == os.stat("/..").st_ino, os.path.exists("/oldroot"))
    """
    assert python(code) == "True\nTrue False\n"


# The caller's environment and arguments


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSBOX_TEST_TOKEN", "sekrit")
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "SSH_AUTH_SOCK", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "/sekrit")
    assert "sekrit" in here("import os; print(os.environ)"), "the control"
    names = [line.partition("=")[0] for line in out("env").splitlines()]
    assert sorted(names) == ["HOME", "LANG", "LOGNAME", "PATH", "TERM", "USER"]
    assert "sekrit" not in out("sh", "-c", "cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; true")


def test_F22_values_are_in_nobody_s_arguments() -> None:
    seen: list[bytes] = []

    def look(_: bytes) -> None:
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    seen.append(Path(f"/proc/{name}/cmdline").read_bytes())

    assert nsbox.run(["sh", "-c", "echo up; sleep 0.2"], env={"TOKEN": "sekrit123"}, on_stdout=look).ok
    assert any(b"sleep 0.2" in one for one in seen), "the control"
    assert not any(b"sekrit123" in one for one in seen)


def test_S01_nothing_of_the_caller_in_the_memory_of_init() -> None:
    """The helper is started with an empty environment, so that even pid 1 has nothing to tell."""
    from nsbox import _native

    nsbox.run(["true"])
    pid = _native.zygote().pid
    assert Path("/proc/self/environ").read_bytes() != b"", "the control"
    with contextlib.suppress(PermissionError):
        assert Path(f"/proc/{pid}/environ").read_bytes() == b""
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert "memfd:nsbox-helper" in os.readlink(f"/proc/{pid}/exe")


def test_core_dumps_are_off() -> None:
    assert out("sh", "-c", "ulimit -c; ulimit -Hc") == "0\n0\n"
    result = nsbox.run(["sh", "-c", "ulimit -c unlimited; kill -SEGV $$"])
    assert result.signal == 11
    assert nsbox.run(["sh", "-c", "sh -c 'kill -ABRT $$'; ls -A"]).stdout == b""


# Processes


def test_processes() -> None:
    listed = [name for name in os.listdir("/proc") if name.isdigit()]
    assert str(os.getpid()) in listed, "the control"
    code = (
        "import os; "
        "pids = {int(n) for n in os.listdir('/proc') if n.isdigit()}; "
        "print(pids == {1, os.getpid()}, os.getpid() < 10, os.getppid())"
    )
    assert python(code) == "True True 1\n"


def test_F10_processes_outside_are_not_to_be_had() -> None:
    pid = os.getpid()
    assert Path(f"/proc/{pid}/environ").read_bytes(), "the control"
    for name in ("environ", "mem", "root", "maps", "status", "fd"):
        assert nsbox.run(["ls", f"/proc/{pid if pid > 3 else 99999}/{name}"]).exit_code != 0


def test_signals_do_not_reach_outside() -> None:
    victim = subprocess.Popen(["sleep", "60"])
    try:
        assert out(
            "python3",
            "-c",
            f"import os\ntry: os.kill({victim.pid}, 9); print('killed')\nexcept OSError as e: print(e.errno)",
        ) in ("3\n", "1\n")
        nsbox.run(["sh", "-c", "kill -9 -1"])
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_session_process_group_and_terminal_are_its_own() -> None:
    code = "import os; print(os.getsid(0) == os.getpgrp() == os.getpid(), [os.isatty(n) for n in range(3)])"
    assert python(code) == "True [False, False, False]\n"
    assert nsbox.run(["sh", "-c", "echo x >/dev/tty"]).exit_code != 0


def test_priority_and_affinity_can_only_be_lowered() -> None:
    code = """
    import os
    try: os.setpriority(os.PRIO_PROCESS, 0, -5); print("raised")
    except PermissionError: print("refused")
    """
    assert python(code) in ("refused\n",)


# Network


def test_N01_links_and_routes() -> None:
    with open("/proc/net/dev") as file:
        outside = [line.split(":")[0].strip() for line in file.readlines()[2:]]
    if outside == ["lo"]:
        pytest.skip("the control: the host has no link but loopback")
    code = """
    import socket
    print([name for _, name in socket.if_nameindex()], len(open("/proc/net/route").readlines()))
    """
    # sit0 and tunl0 are made by some kernels in every network namespace; they lead nowhere.
    names = eval(python(code).split("] ")[0] + "]")
    assert set(names) <= {
        "lo",
        "sit0",
        "tunl0",
        "gre0",
        "gretap0",
        "erspan0",
        "ip_vti0",
        "ip6_vti0",
        "ip6tnl0",
        "ip6gre0",
    }
    assert python(code).split("] ")[1].strip() in ("1", "0")


def test_sockets_of_the_host() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert f"{server.getsockname()[1]:04X}" in Path("/proc/net/tcp").read_text(), "the control"
        assert len(out("cat", "/proc/net/tcp", "/proc/net/udp", "/proc/net/unix").splitlines()) == 3


# IPC


@pytest.fixture
def segment() -> Iterator[int]:
    """A System V shared memory segment of the host, open to everybody."""
    libc = ctypes.CDLL(None, use_errno=True)
    key = 0x6E73 << 16 | os.getpid() & 0xFFFF
    identifier = libc.shmget(key, 4096, 0o1666)
    if identifier < 0:
        pytest.skip("the control: this host has no System V shared memory")
    yield key
    libc.shmctl(identifier, 0, None)


def test_system_v_ipc(segment: int) -> None:
    attempt = f"import ctypes; print(ctypes.CDLL(None).shmget({segment}, 0, 0) >= 0)"
    assert here(attempt) == "True\n"
    assert python(attempt) == "False\n"
    assert len(out("cat", "/proc/sysvipc/shm").splitlines()) == 1


def test_posix_shared_memory_and_semaphores() -> None:
    memory = Path(f"/dev/shm/test-{os.getpid()}")
    memory.write_bytes(b"x")
    try:
        assert out("ls", "-A", "/dev/shm") == ""
        assert nsbox.run(["cat", str(memory)]).exit_code != 0
    finally:
        memory.unlink()


def test_posix_message_queues() -> None:
    code = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    print(libc.mq_open(b"/nsbox-%d", os.O_RDWR) >= 0)
    """
    libc = ctypes.CDLL(None, use_errno=True)
    name = b"/nsbox-%d" % os.getpid()
    queue = libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o666, None)
    if queue < 0:
        pytest.skip("the control: this host has no POSIX message queues")
    try:
        attempt = code.replace("%d", str(os.getpid()))
        assert here(attempt) == "True\n"
        assert python(attempt) == "False\n"
    finally:
        libc.close(queue)
        libc.mq_unlink(name)


def test_host_name() -> None:
    assert out("sh", "-c", "hostname 2>/dev/null || uname -n").strip() == "nsbox"
    assert os.uname().nodename != "nsbox", "the control"
    assert os.uname().nodename not in out("cat", "/etc/hostname", "/etc/hosts", "/proc/sys/kernel/hostname")


def test_keyrings() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(248, b"user", b"nsbox-test", b"x", ctypes.c_long(1), ctypes.c_long(-4)) < 0:  # the user keyring
        pytest.skip("the control: this host has no keyrings")
    try:
        assert "nsbox-test" in Path("/proc/keys").read_text(), "the control"
        assert out("cat", "/proc/keys") == ""
        assert "nsbox-test" not in out("sh", "-c", "cat /proc/key-users 2>/dev/null; true")
    finally:
        key = libc.syscall(249, b"user", b"nsbox-test", None, ctypes.c_long(-4))
        libc.syscall(250, ctypes.c_long(9), ctypes.c_long(key), ctypes.c_long(-4), 0, 0)


# Descriptors


@pytest.fixture
def leaky() -> Iterator[list[int]]:
    """What a careless embedding process holds open and inheritable: a file, a directory, sockets, a memfd, pipes."""
    held = [os.open("/etc/hostname", os.O_RDONLY), os.open("/", os.O_RDONLY), os.memfd_create("secret"), *os.pipe()]
    pair = socket.socketpair()
    held += [pair[0].detach(), pair[1].detach()]
    for fd in held:
        os.set_inheritable(fd, True)
    yield held
    for fd in held:
        os.close(fd)


FDS = """
import os
found = set()
for pid in [n for n in os.listdir("/proc") if n.isdigit()]:
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try: found.add((int(fd), os.readlink(f"/proc/{pid}/fd/{fd}").split(":")[0]))
            except OSError: pass
    except OSError: pass
print(sorted(found))
"""


def test_F03_descriptors(leaky: list[int]) -> None:
    control = subprocess.run(
        ["ls", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True
    ).stdout
    assert {str(fd) for fd in leaky} <= set(control.split())
    assert python(FDS) == "[(0, '/dev/null'), (1, 'pipe'), (2, 'pipe')]\n"
    assert python(FDS, stdin="x") == "[(0, 'pipe'), (1, 'pipe'), (2, 'pipe')]\n"
    assert nsbox.run(["sh", "-c", f"cat <&{leaky[0]}"]).exit_code != 0


@pytest.mark.slow
def test_G25_descriptors_opened_by_other_threads_meanwhile() -> None:
    stop = threading.Event()
    seen = []

    def open_and_close() -> None:
        while not stop.is_set():
            fds = [os.open("/etc", os.O_RDONLY) for _ in range(20)]
            for fd in fds:
                os.set_inheritable(fd, True)
            time.sleep(0.001)
            for fd in fds:
                os.close(fd)

    threads = [threading.Thread(target=open_and_close) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            seen.append(python(FDS))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(seen) == {"[(0, '/dev/null'), (1, 'pipe'), (2, 'pipe')]\n"}


def test_F02_working_directory_is_inside() -> None:
    assert (
        python("import os; print(os.getcwd(), os.stat('.').st_dev == os.stat('/home').st_dev)") == "/home/user True\n"
    )


def test_pipes_cannot_be_used_backwards() -> None:
    """The payload owns only the writing ends of its output pipes: reading them would steal what others wrote."""
    code = """
    import os
    for fd in (1, 2):
        try: os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK)); print("reopened")
        except OSError as e: print(e.errno)
    """
    python(code)  # it may, for they are its own; what matters is that the run still ends and keeps what was written
    assert python("import os; fd = os.open('/proc/self/fd/1', os.O_RDONLY); print('x')") == "x\n"


# The kernel's own files


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize(
    "path",
    [
        "/proc/kcore",
        "/proc/keys",
        "/proc/timer_list",
        "/proc/kmsg",
        "/proc/sched_debug",
        "/proc/latency_stats",
        "/sys/kernel/notes",
        "/sys/class/net",
        "/sys/firmware",
        "/proc/acpi",
        "/proc/scsi",
    ],
)
def test_F09_reads_give_nothing(path: str, uid: int) -> None:
    if not os.path.exists(path):
        pytest.skip(f"the control: this kernel has no {path}")
    result = nsbox.run(
        ["sh", "-c", f"if test -d {path}; then ls -A {path}; else head -c 100 {path}; fi 2>/dev/null"], uid=uid
    )
    assert result.stdout == b""


@pytest.mark.parametrize("uid", [0, 1000])
def test_F09_addresses_of_the_kernel_are_not_told(uid: int) -> None:
    if not os.path.exists("/proc/kallsyms"):
        pytest.skip("the control: this kernel has no /proc/kallsyms")
    addresses = {line.split()[0].strip("0") for line in out("cat", "/proc/kallsyms", uid=uid).splitlines()}
    assert addresses <= {""}


WRITES = [
    "/proc/sysrq-trigger",
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/hostname",
    "/proc/sys/vm/drop_caches",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/kernel/modprobe",
    "/proc/irq/default_smp_affinity",
    "/proc/mtrr",
    "/proc/sys/fs/binfmt_misc/register",
    "/proc/sys/user/max_user_namespaces",
    "/proc/self/oom_score_adj",
    "/sys/kernel/uevent_helper",
    "/proc/1/oom_score_adj",
    "/proc/sys/net/core/somaxconn",
]


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("path", WRITES)
def test_F09_writes_are_refused(path: str, uid: int) -> None:
    if not os.path.exists(path):
        pytest.skip(f"the control: this kernel has no {path}")
    code = f"""
    import os, stat
    try:
        status = os.stat({path!r})
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat("/dev/null").st_rdev:
            raise OSError(0, "covered by /dev/null")
        with open({path!r}, "r+") as file:
            value = file.read().strip() if "trigger" not in {path!r} else ""
            file.seek(0); file.write("-1000" if "oom" in {path!r} else value or "0")
        print("written")
    except OSError as error:
        print(error.errno)
    """
    assert python(code, uid=uid) != "written\n"


def test_F09_no_sys_and_proc_is_of_its_own() -> None:
    assert os.path.isdir("/sys/kernel"), "the control"
    assert nsbox.run(["ls", "/sys"]).exit_code != 0
    assert out("cat", "/proc/self/loginuid") in ("4294967295", Path("/proc/self/loginuid").read_text())


def test_F11_cgroups() -> None:
    found = out(
        "sh",
        "-c",
        "grep cgroup /proc/self/mountinfo /proc/mounts; ls -d /sys/fs/cgroup 2>/dev/null;"
        "find / -xdev -name 'cgroup.procs' -o -name release_agent 2>/dev/null; true",
    )
    assert Path("/proc/mounts").read_text().count("cgroup"), "the control"
    assert found == ""
    for line in out("cat", "/proc/self/cgroup").splitlines():
        assert line.split(":")[2] == "/", line


def test_F15_devices() -> None:
    assert len(os.listdir("/dev")) > 12, "the control"
    assert out("ls", "-A", "/dev").split() == sorted(
        ["fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"]
    )
    assert out("ls", "-A", "/dev/pts").split() == ["ptmx"]
    assert out("stat", "-c", "%a", "/dev/pts/ptmx", "/dev/null", "/dev/shm").split() == ["666", "666", "1777"]
    assert (
        out(
            "sh",
            "-c",
            "touch /dev/x 2>/dev/null || echo refused; mknod /tmp/d c 1 3 2>/dev/null || echo refused",
            uid=0,
        )
        == "refused\nrefused\n"
    )
    assert (
        out(
            "sh",
            "-c",
            "echo gone >/dev/null; head -c 4 /dev/zero | wc -c; head -c 4 /dev/urandom | wc -c;"
            "echo x >/dev/full || echo full",
        )
        == "4\n4\nfull\n"
    )


# Rights


@pytest.mark.parametrize("policy", ["strict", "default", "permissive"])
@pytest.mark.parametrize("uid", [0, 1000])
def test_rights_of_the_payload(uid: int, policy: str) -> None:
    status = fields(uid=uid, seccomp=policy)
    assert {
        name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    } == dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0)
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert status["Uid"].split() == [str(uid)] * 4
    assert status["Gid"].split() == [str(uid)] * 4
    assert status["Groups"].split() == []
    assert {name: int(status[name], 16) for name in ("SigBlk", "SigIgn", "SigPnd")} == {
        "SigBlk": 0,
        "SigIgn": 0,
        "SigPnd": 0,
    }
    assert status["Umask"] == "0022"


def test_securebits_are_locked() -> None:
    code = "import ctypes; print(hex(ctypes.CDLL(None).prctl(27, 0, 0, 0, 0)))"
    bits = int(python(code), 16)
    assert bits & 0x3F == 0x2F, hex(bits)  # NOROOT, NO_SETUID_FIXUP and their locks, KEEP_CAPS_LOCKED
    assert bits & 0xC0 == 0xC0, hex(bits)  # NO_CAP_AMBIENT_RAISE and its lock
    assert int(here(code), 16) & 0x3F == 0, "the control"


def test_root_inside_is_nobody_outside() -> None:
    seen: list[tuple[int, int]] = []

    def look(data: bytes) -> None:
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and b"sleep\0000.31" in Path(f"/proc/{name}/cmdline").read_bytes():
                    seen.append((os.stat(f"/proc/{name}").st_uid, os.getuid()))

    nsbox.run(["sh", "-c", "echo; sleep 0.31 & wait"], uid=0, on_stdout=look)
    assert seen or nsbox.run(["sh", "-c", "echo; sleep 0.01; echo; sleep 0.31 & wait"], uid=0, on_stdout=look)
    for outside, caller in seen:
        assert outside == caller or caller == 0
        assert outside != 0


def test_landlock_restricts_writes_of_the_payload() -> None:
    result = nsbox.run(["sh", "-c", "touch /etc/x /opt/x /x 2>&1; echo done"])
    assert result.stdout_text.count("denied") == 3
    if result.enforced["landlock"]["strength"] == "none":
        pytest.skip("this kernel has no Landlock")


def test_init_is_not_the_payload_and_says_little() -> None:
    assert out("cat", "/proc/1/comm") == "nsbox-init\n"
    assert nsbox.run(["cat", "/proc/1/environ"]).exit_code != 0
    for name in ("fd", "cwd", "root", "exe", "map_files"):
        assert nsbox.run(["ls", "-l", f"/proc/1/{name}/"], uid=0).exit_code != 0


def test_every_layer_says_that_it_is_enforced() -> None:
    enforced = nsbox.run(["true"]).enforced
    for layer in (
        "user_ns",
        "mount_ns",
        "pid_ns",
        "net_ns",
        "ipc_ns",
        "uts_ns",
        "cgroup_ns",
        "pivot_root",
        "overlay",
        "seccomp",
        "no_new_privs",
        "capabilities",
        "egress",
    ):
        assert enforced[layer]["strength"] == "kernel", layer


@pytest.mark.parametrize("kind", ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"])
def test_namespaces_are_not_the_caller_s(kind: str) -> None:
    assert python(f"import os; print(os.readlink('/proc/self/ns/{kind}'))").strip() != os.readlink(
        f"/proc/self/ns/{kind}"
    )


def test_two_sandboxes_do_not_see_each_other() -> None:
    first: list[str] = []

    def look(data: bytes) -> None:
        first.append(
            out(
                "sh",
                "-c",
                "ls /tmp /dev/shm; ls -d /proc/[0-9]* | wc -l; ls /proc/sysvipc >/dev/null; cat /proc/net/unix | wc -l",
            )
        )

    code = """
    import socket, time, os
    open("/tmp/first", "w"); open("/dev/shm/first", "w")
    s = socket.socket(socket.AF_UNIX); s.bind("\\0first"); s.listen()
    print("up", flush=True); time.sleep(0.5)
    """
    nsbox.run(["python3", "-c", textwrap.dedent(code)], on_stdout=look)
    assert "first" not in first[0]
    assert first[0].split()[-1] == "1"
