"""Problems that users of other sandboxes met, one test or more for each; the id is that of the collection."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import until

import nsbox
from nsbox import errors

COMMAND = [sys.executable, "-m", "nsbox"]


def runner(*words: str, timeout: float = 60, **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """The command-line form."""
    return subprocess.run([*COMMAND, "run", *words], capture_output=True, timeout=timeout, **options)  # type: ignore[call-overload, no-any-return]


def living(*words: str) -> list[int]:
    """Host pids whose arguments are exactly these, or begin with them."""
    wanted = "\0".join(words).encode() + b"\0"
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{name}/cmdline").read_bytes().startswith(wanted):
                    found.append(int(name))
    return found


# A: exit status and signal fidelity


@pytest.mark.parametrize(
    "script, code, number, shown",
    [
        ("kill -ABRT $$", None, 6, 134),
        ("kill -TERM $$; echo alive", None, 15, 143),
        ("exit 143", 143, None, 143),
        ("exit 0", 0, None, 0),
        ("exit 255", 255, None, 255),
        ("exit 124", 124, None, 124),
        ("exit 125", 125, None, 125),
        ("exit 137", 137, None, 137),
        ("kill -KILL $$", None, 9, 137),
        ("kill -SEGV $$", None, 11, 139),
        ("kill -PIPE $$", None, 13, 141),
        ("kill -HUP $$", None, 1, 129),
        ("kill -64 $$", None, 64, 192),
        ("sh -c 'kill -ABRT $$'; exit $?", 134, None, 134),
    ],
)
def test_A01_signals_are_not_statuses(script: str, code: int | None, number: int | None, shown: int) -> None:
    result = nsbox.run(["sh", "-c", script])
    assert (result.exit_code, result.signal, result.status) == (code, number, shown)
    assert result.reason == ("exited" if number is None else "signaled")
    assert result.stdout == b""


def test_A01_every_exit_status() -> None:
    code = """
    import os
    for n in range(256):
        p = os.fork()
        if p == 0: os._exit(n)
        assert os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) == n
    """
    assert nsbox.run(["python3", "-c", textwrap.dedent(code)]).ok
    assert [nsbox.run(["sh", "-c", f"exit {n}"]).exit_code for n in (1, 2, 64, 100, 126, 127, 128, 200, 254)] == [
        1,
        2,
        64,
        100,
        126,
        127,
        128,
        200,
        254,
    ]


@pytest.mark.parametrize(
    "script, shown", [("kill -ABRT $$", 134), ("kill -TERM $$; echo alive", 143), ("exit 143", 143), ("exit 7", 7)]
)
def test_A01_on_the_command_line(script: str, shown: int) -> None:
    made = runner("--", "sh", "-c", script)
    assert (made.returncode, made.stdout) == (shown, b""), made.stderr


def test_A02_set_up_failures_have_a_space_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(errors.SpecError, match="missing"):
        nsbox.run(["true"], ro=str(tmp_path / "missing"))
    assert nsbox.run(["sh", "-c", "exit 255"]).exit_code == 255
    with pytest.raises(errors.CommandError) as caught:
        nsbox.run(["/no/such/program"])
    assert (caught.value.exit_code, "/no/such/program" in str(caught.value)) == (127, True)
    with pytest.raises(errors.CommandError) as caught:
        nsbox.run(["no-such-program"])
    assert caught.value.exit_code == 127
    (tmp_path / "plain").write_text("#!/bin/sh\necho never\n")
    for command in ("/m/plain", "/etc/passwd", "/tmp", "/m"):
        with pytest.raises(errors.CommandError) as caught:
            nsbox.run([command], ro=[(str(tmp_path), "/m")])
        assert caught.value.exit_code == 126, command


@pytest.mark.parametrize(
    "words, shown",
    [
        (["--ro", "/no/such/source", "--", "true"], 125),
        (["--", "sh", "-c", "exit 255"], 255),
        (["--", "/no/such/program"], 127),
        (["--", "no-such-program"], 127),
        (["--", "/etc/passwd"], 126),
        (["--", "/tmp"], 126),
        (["--cwd", "/no/such/place", "--", "true"], 125),
        (["--timeout", "0.2s", "--", "sleep", "60"], 124),
    ],
)
def test_A02_on_the_command_line(words: list[str], shown: int) -> None:
    made = runner(*words)
    assert made.returncode == shown, made.stderr
    assert b"Traceback" not in made.stderr
    if shown in (125, 126, 127):
        assert made.stderr.strip()


@pytest.mark.parametrize(
    "content, code",
    [
        (b"", 126),
        (b"\x7fELF", 126),
        (b"#!/no/such/interpreter\n", 127),
        (b"#!\n", 126),
        (b"just text\n", 126),
        (b"#!/bin/sh\nexit 9\n", 9),
    ],
)
def test_A02_programs_that_are_none(content: bytes, code: int, tmp_path: Path) -> None:
    """What execve(2) refuses is 126; a missing interpreter says ENOENT, as a missing program does."""
    (tmp_path / "program").write_bytes(content)
    (tmp_path / "program").chmod(0o755)
    try:
        shown = nsbox.run(["/m/program"], ro=[(str(tmp_path), "/m")]).exit_code
    except errors.CommandError as error:
        shown = error.exit_code
    assert shown == code or (code == 127 and shown == 126)


def test_A03_sigchld_ignored_by_the_parent() -> None:
    if shutil.which("perl") is None:
        pytest.skip("needs perl, for a shell sets SIGCHLD back")
    before = time.monotonic()
    made = subprocess.run(
        [
            "perl",
            "-e",
            '$SIG{CHLD}="IGNORE"; exec @ARGV',
            *COMMAND,
            "run",
            "--",
            "sh",
            "-c",
            "grep SigIgn /proc/self/status; exit 7",
        ],
        capture_output=True,
        timeout=30,
    )
    assert made.returncode == 7, made.stderr
    assert made.stdout.split()[1] == b"0000000000000000"
    assert time.monotonic() - before < 15


# B: process trees


def zombies() -> set[str]:
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{name}/stat").read_text(errors="replace")
                if stat.rpartition(")")[2].split()[0] == "Z":
                    found.add(f"{name} {stat.rpartition(')')[2].split()[19]}")
    return found


@pytest.mark.slow
def test_B07_no_zombie_in_a_long_life() -> None:
    before, seen = zombies(), set()
    for _ in range(100):
        nsbox.run(["sh", "-c", "true & true | true"])
        seen |= {zombie for zombie in zombies() - before if parent(zombie.split()[0]) == os.getpid()}
    assert seen == set()


def parent(pid: str) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def test_B07_orphans_inside_are_reaped() -> None:
    script = "for i in 1 2 3 4 5; do (sh -c 'exit 3' &) ; done; sleep 0.2; cat /proc/[0-9]*/stat | grep -c ' Z '"
    assert nsbox.run(["sh", "-c", script]).stdout.strip() == b"0"


def test_B08_the_supervisor_is_killed() -> None:
    marker = f"397.{os.getpid()}"
    process = subprocess.Popen(
        [*COMMAND, "run", "--timeout", "60", "--", "sh", "-c", f"echo up; sleep {marker} | cat"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert until(lambda: living("sleep", marker), 5), "the control"
    process.kill()
    assert until(lambda: not living("sleep", marker), 1)
    assert process.stdout.read() == b"", "the caller's pipe is at its end"
    process.wait()
    process.stdout.close()
    nsbox.run(["true"])  # the next run collects what a killed one could not put away


# D: standard streams


@pytest.mark.parametrize("how", ["library", "command line", "command line, stdin closed", "command line, stdin open"])
def test_D13_unset_stdin_is_at_its_end(how: str) -> None:
    script = ["sh", "-c", "cat; echo eof"]
    before = time.monotonic()
    if how == "library":
        assert nsbox.run(script).stdout == b"eof\n"
    elif how == "command line":
        assert runner("--", *script, stdin=subprocess.DEVNULL).stdout == b"eof\n"
    elif how == "command line, stdin closed":
        made = subprocess.run(
            ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "run", "--", *script], capture_output=True, timeout=30
        )
        assert made.stdout == b"eof\n", made.stderr
    else:
        reader, writer = os.pipe()
        try:
            assert runner("--", *script, stdin=reader, timeout=20).stdout == b"eof\n"
        finally:
            os.close(reader)
            os.close(writer)
    assert time.monotonic() - before < 15


def memory_now() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("script", ["yes", "yes & yes >&2", "cat /dev/zero"])
def test_D14_output_without_end(script: str) -> None:
    nsbox.run(["true"])
    before, start = memory_now(), time.monotonic()
    result = nsbox.run(["sh", "-c", script], output="1M", timeout=1, memory="64M")
    assert memory_now() - before < 8 << 20
    assert time.monotonic() - start < 30
    assert len(result.stdout) == 1 << 20
    assert result.stdout_truncated
    assert result.stderr_truncated == (">&2" in script)
    assert result.reason in ("timeout", "output")
    assert "output" in {hit["limit"] for hit in result.limits_hit}


@pytest.mark.parametrize(
    "words, expected",
    [
        (["printf", "a\\360b"], b"a\xf0b"),
        (["printf", "\\000\\001\\377"], b"\x00\x01\xff"),
        (["printf", "\\303"], b"\xc3"),
    ],
)
def test_D15_output_that_is_not_utf8(words: list[str], expected: bytes) -> None:
    result = nsbox.run(words)
    assert result.ok
    assert result.stdout == expected
    assert "\ufffd" in result.stdout_text
    assert result.to_json()


def test_D15_random_output_and_a_cut_character() -> None:
    result = nsbox.run(["sh", "-c", "tee /dev/stderr </dev/urandom | head -c 4096"], output=4096)
    assert len(result.stdout) == 4096
    assert isinstance(result.stdout_text, str)
    cut = nsbox.run(["printf", "ééé"], output=3)
    assert (cut.stdout, cut.stdout_text, cut.stdout_truncated) == ("é".encode() + b"\xc3", "é\ufffd", True)
    assert runner("--", "printf", "a\\360b").stdout == b"a\xf0b"


# E: terminals


def test_E19_terminals_can_be_opened() -> None:
    code = (
        "import os; m, s = os.openpty(); print(os.ttyname(s)); "
        "m2, s2 = os.openpty(); print(os.ttyname(s2), os.listdir('/dev/pts'))"
    )
    first, second = nsbox.run(["python3", "-c", code]).check().stdout_text.splitlines()
    assert first == "/dev/pts/0"
    assert second.startswith("/dev/pts/1")
    assert sorted(eval(second.partition(" ")[2])) == ["0", "1", "ptmx"]
    assert nsbox.run(["stat", "-c", "%a", "/dev/pts/ptmx"]).stdout == b"666\n"
    if shutil.which("script", path="/usr/bin"):
        result = nsbox.run(["script", "-qec", "tty", "/dev/null"])
        assert (result.exit_code, result.stdout_text.strip()) == (0, "/dev/pts/0")


# F: identity and environment


@pytest.mark.parametrize("uid", [0, 1000, 12345])
def test_F21_identity(uid: int) -> None:
    code = (
        "import os, pwd; h = os.path.expanduser('~'); "
        "print(pwd.getpwuid(os.getuid()).pw_name, h, os.access(h, os.W_OK), os.environ['HOME'] == h)"
    )
    name, home, writable, same = nsbox.run(["python3", "-c", code], uid=uid).check().stdout_text.split()
    assert (name, home) == (("root", "/root") if uid == 0 else ("user", "/home/user"))
    assert writable == same == "True"
    assert nsbox.run(["sh", "-c", "id -gn && whoami"], uid=uid).check().stdout_text.split() == [name, name]
    if shutil.which("git", path="/usr/bin"):
        assert (
            nsbox.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "init", "-q", "r"], uid=uid).exit_code == 0
        )


def test_F22_environment_is_in_nobody_s_arguments() -> None:
    seen: list[bytes] = []

    def look(_: bytes) -> None:
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    seen.append(Path(f"/proc/{name}/cmdline").read_bytes())

    nsbox.run(["sh", "-c", "echo; sleep 0.1"], env={"TOKEN": "sekrit" + "123"}, on_stdout=look)
    assert seen
    assert not [one for one in seen if b"sekrit" + b"123" in one]


# G: inherited descriptors, limits, cwd


def test_G25_descriptors_of_the_caller() -> None:
    code = """
    import os, sys, threading, nsbox
    secret = os.open("/etc/hostname", os.O_RDONLY); os.dup2(secret, 9); os.set_inheritable(9, True)
    def opener():
        while True:
            fd = os.open("/etc/hostname", os.O_RDONLY); os.set_inheritable(fd, True); os.close(fd)
    threading.Thread(target=opener, daemon=True).start()
    for _ in range(10):
        result = nsbox.run(["sh", "-c", "echo /proc/self/fd/*; ls /proc/self/fd; cat <&9"])
        print(result.stdout_text.split()[-4:], result.exit_code != 0)
    """
    made = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert made.stdout.splitlines() == ["['0', '1', '2', '3'] True"] * 10, made.stderr


@pytest.mark.root
def test_G26_a_busy_user_does_not_fail_the_sandbox() -> None:
    """The same host uid already owns many processes: a limit by RLIMIT_NPROC would count them."""
    code = """
    import os, resource, subprocess
    os.setresgid(61235, 61235, 61235); os.setgroups([]) if os.getuid() == 0 else None; os.setresuid(61235, 61235, 61235)
    os.environ["XDG_RUNTIME_DIR"] = os.environ["HOME"] = os.environ["TMPDIR"]
    sleepers = [subprocess.Popen(["sleep", "30"]) for _ in range(100)]
    import nsbox
    result = nsbox.run(["sh", "-c", "for i in 1 2 3 4 5; do sleep 0.2 & done; wait; echo ok"], pids=32)
    print(result.stdout_text, result.stderr_text)
    for sleeper in sleepers: sleeper.kill(); sleeper.wait()
    """
    folder = Path(f"/tmp/g26-{os.getpid()}")
    folder.mkdir(mode=0o700)
    os.chown(folder, 61235, 61235)
    try:
        readable = subprocess.run(
            ["/usr/bin/python3", "-c", "import sys; sys.path[:0] = sys.argv[1:]; import nsbox._native", *search_path()],
            user=61235,
            group=61235,
            extra_groups=[],
            capture_output=True,
        )
        if readable.returncode:
            pytest.skip("the package cannot be read by another user here")
        made = subprocess.run(
            [
                "/usr/bin/python3",
                "-c",
                "import sys; sys.path[:0] = sys.argv[1:]\n" + textwrap.dedent(code),
                *search_path(),
            ],
            env={**os.environ, "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert made.stdout.startswith("ok"), made.stdout + made.stderr
    finally:
        shutil.rmtree(folder)


def search_path() -> list[str]:
    """Where this nsbox and what it needs come from, for another interpreter of the same version."""
    import cffi

    return [str(Path(nsbox.__file__).parents[1]), str(Path(cffi.__file__).parents[1])]


# H: memory


@pytest.mark.parametrize("program", ["node", "java", "python3"])
def test_H29_memory_is_what_is_resident(program: str) -> None:
    if shutil.which(program, path="/usr/bin") is None:
        pytest.skip(f"{program} is not installed beneath /usr")
    words = {
        "node": ["-e", 'console.log("ok")'],
        "java": ["-version"],
        "python3": ["-c", 'import mmap; m = mmap.mmap(-1, 8 << 30); print("ok")'],
    }[program]
    result = nsbox.run([program, *words], memory="256M")
    assert result.ok, result.stderr_text


# J: system calls


def test_J35_new_calls_seem_not_to_exist() -> None:
    assert (
        nsbox.run(
            ["python3", "-c", "import threading as t; x = t.Thread(target=print, args=('ok',)); x.start(); x.join()"]
        ).stdout
        == b"ok\n"
    )
    code = """
    import ctypes, errno
    libc = ctypes.CDLL(None, use_errno=True)
    for number, arguments in ((435, (0, 0)), (425, (-1, 0)), (9999, ()), (600, ()), (470, (-1,))):
        libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
        print(number, errno.errorcode[ctypes.get_errno()])
    """
    told = dict(
        line.split() for line in nsbox.run(["python3", "-c", textwrap.dedent(code)]).check().stdout_text.splitlines()
    )
    assert told["435"] in ("ENOSYS", "EINVAL")
    assert told["425"] in ("ENOSYS", "EPERM", "EINVAL", "EFAULT")
    assert told["9999"] == told["600"] == "ENOSYS"
    if shutil.which("node", path="/usr/bin"):
        assert (
            nsbox.run(["node", "-e", 'require("fs").readFile("/etc/passwd", () => console.log("ok"))']).stdout
            == b"ok\n"
        )


# K: binds and mount points


K37 = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
uid, gid = os.getuid(), os.getgid()
assert libc.unshare(0x10000000 | 0x20000) == 0, os.strerror(ctypes.get_errno())
for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
    open(f"/proc/self/{name}", "w").write(text)
at = sys.argv[1].encode()
assert libc.mount(b"none", at, b"tmpfs", 2 | 4 | 8, b"mode=700") == 0, os.strerror(ctypes.get_errno())
open(sys.argv[1] + "/f", "w").write("content\\n")
sys.path[:0] = sys.argv[2:]
import nsbox
script = "cat /mnt/f; echo y >/mnt/f; grep ' /mnt ' /proc/self/mountinfo"
result = nsbox.run(["sh", "-c", script], ro=[(sys.argv[1], "/mnt")])
print(result.stdout_text, result.stderr_text)
"""


@pytest.mark.user
def test_K37_read_only_bind_of_a_locked_mount(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-c", K37, str(tmp_path), *search_path()], capture_output=True, text=True, timeout=60
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("content\n")
    assert "Read-only file system" in made.stdout
    options = next(line for line in made.stdout.splitlines() if " /mnt " in line).split()[5].split(",")
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(options)


# L: overlay


@pytest.mark.parametrize("name", ["a:b,c\\d e", "upperdir=x,workdir=y", ":", "a\nb"])
def test_L41_separators_in_layer_paths(name: str, tmp_path: Path) -> None:
    at = tmp_path / name
    at.mkdir()
    (at / "f").write_text("here\n")
    assert nsbox.run(["cat", "f"], workspace=(str(at), "/work")).stdout == b"here\n"
    assert nsbox.run(["cat", "/mnt/f"], ro=[(str(at), "/mnt")]).stdout == b"here\n"


def test_L42_a_layer_with_a_mount_beneath_is_told_by_name(tmp_path: Path) -> None:
    """A workspace with another file system mounted somewhere below: it works, or the error names the layer."""
    code = """
    import ctypes, os, sys
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if uid:
        assert libc.unshare(0x10000000) == 0
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            open(f"/proc/self/{name}", "w").write(text)
    assert libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None) == 0
    at = sys.argv[1]; os.makedirs(at + "/w/below"); open(at + "/w/f", "w").write("x")
    assert libc.mount(b"none", (at + "/w/below").encode(), b"tmpfs", 0, None) == 0
    sys.path[:0] = sys.argv[2:]
    import nsbox, nsbox.errors
    try: print("ran", nsbox.run(["ls"], workspace=at + "/w").stdout_text.split())
    except nsbox.errors.NsboxError as error: print("refused", at + "/w" in str(error), str(error).count("\\n"))
    """
    made = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), *search_path()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.stdout.strip() in ("ran ['below', 'f']", "refused True 0"), made.stdout + made.stderr


@pytest.mark.root
@pytest.mark.parametrize("what", ["workspace", "root"])
def test_L42_a_layer_on_overlayfs_works(what: str, tmp_path: Path) -> None:
    """As in a container: the lower layer is itself an overlay."""
    code = """
    import ctypes, os, sys, shutil
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None) == 0
    at = sys.argv[1]
    for name in ("l", "u", "w", "m"): os.mkdir(f"{at}/{name}")
    open(at + "/l/f", "w").write("content")
    layers = f"lowerdir={at}/l,upperdir={at}/u,workdir={at}/w".encode()
    if libc.mount(b"overlay", (at + "/m").encode(), b"overlay", 0, layers):
        print("no overlay here"); sys.exit()
    import nsbox, nsbox.errors
    try:
        if sys.argv[2] == "workspace":
            result = nsbox.run(["sh", "-c", "cat f; echo changed >f; cat f"], workspace=at + "/m")
            print(result.stdout_text, result.stderr_text)
        else:
            os.mkdir(at + "/m/etc")
            try: nsbox.run(["/none"], root=at + "/m")
            except nsbox.errors.CommandError: print("contentchanged")
    except nsbox.errors.NsboxError as error: print("refused", error)
    print(open(at + "/m/f").read(), os.listdir(at + "/u"))
    """
    made = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), what], capture_output=True, text=True, timeout=60
    )
    if made.stdout.startswith("no overlay"):
        pytest.skip("this file system cannot be an overlay's upper layer")
    first = made.stdout.splitlines()[0]
    assert first == "contentchanged" or (first.startswith("refused") and str(tmp_path / "m") in first), (
        made.stdout + made.stderr
    )
    assert made.stdout.splitlines()[-1].startswith("content")


def test_L43_renaming_directories_of_the_lower_layer(tmp_path: Path) -> None:
    (tmp_path / "dir" / "sub").mkdir(parents=True)
    (tmp_path / "dir" / "f").write_text("f\n")
    (tmp_path / "dir" / "f").chmod(0o751)
    code = (
        "import os, errno\ntry: os.rename('dir', 'dir2'); "
        "print('renamed')\nexcept OSError as e: print(errno.errorcode[e.errno])"
    )
    assert nsbox.run(["python3", "-c", code], workspace=str(tmp_path)).stdout in (b"renamed\n", b"EXDEV\n")
    result = nsbox.run(
        ["sh", "-c", "mv dir dir2 && ls && cat dir2/f && stat -c %a dir2/f && test -d dir2/sub"],
        workspace=str(tmp_path),
    )
    assert result.stdout_text.split() == ["dir2", "f", "751"], result.stderr_text


# M: shared memory


def test_M47_semaphores_and_shared_memory() -> None:
    assert (
        nsbox.run(["python3", "-c", "import multiprocessing as m; print(m.Pool(2).map(abs, [-1, -2]))"]).stdout
        == b"[1, 2]\n"
    )
    script = (
        "stat -c %a /dev/shm; dd if=/dev/zero of=/dev/shm/x bs=1M count=200 2>/dev/null && rm /dev/shm/x && echo fits"
    )
    assert nsbox.run(["sh", "-c", script], memory="512M").stdout_text.split() == ["1777", "fits"]


# N: network


N49 = """
import socket, sys, threading
places = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "localhost")]
for family, address in places + [(socket.AF_INET6, "::1")] * len(sys.argv[1:]):
    s = socket.socket(family); s.bind((address, 8000)); s.listen()
    socket.create_connection((address, 8000), 2); s.close(); print("ok")
"""


def test_N49_loopback_is_up() -> None:
    has = os.path.exists("/proc/net/if_inet6")
    result = nsbox.run(["python3", "-c", N49, *(["6"] if has else [])])
    assert result.stdout == b"ok\n" * (3 if has else 2), result.stderr_text


@pytest.mark.parametrize("uid", [0, 1000])
def test_N49_port_80(uid: int) -> None:
    code = (
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 80)); s.listen(); "
        "socket.create_connection(('127.0.0.1', 80)); print('ok')"
    )
    result = nsbox.run(["python3", "-c", code], uid=uid)
    assert result.stdout == b"ok\n", result.stderr_text


def test_N49_two_sandboxes_on_one_port() -> None:
    code = (
        "import socket, time; s = socket.socket(); "
        "s.bind(('127.0.0.1', 8000)); s.listen(); time.sleep(0.4); print('ok')"
    )
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(nsbox.run(["python3", "-c", code]).stdout)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [b"ok\n"] * 2


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tree with the host's own cat and what it is linked with."""
    root = tmp_path / "tree"
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    shutil.copy("/usr/bin/cat", root / "bin" / "cat")
    linked = subprocess.run(["ldd", "/usr/bin/cat"], capture_output=True, text=True).stdout
    for word in linked.split():
        if word.startswith("/") and os.path.exists(word):
            (root / word[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, root / word[1:])
    return root


@pytest.mark.parametrize("kind", ["relative link", "chain", "plain", "missing"])
def test_N50_resolv_conf(kind: str, tiny: Path) -> None:
    resolv = tiny / "etc" / "resolv.conf"
    if kind == "relative link":
        resolv.symlink_to("../run/systemd/resolve/stub-resolv.conf")
    elif kind == "chain":
        resolv.symlink_to("/etc/static/x")
        (tiny / "etc" / "static").symlink_to("/nix/x")
    elif kind == "plain":
        resolv.write_text("nameserver 203.0.113.7\n")
    before = sorted(os.listdir(tiny / "etc")), resolv.is_symlink()
    result = nsbox.run(["cat", "/etc/resolv.conf"], root=str(tiny))
    assert result.ok, result.stderr_text
    assert "203.0.113.7" not in result.stdout_text, "the tree's resolver, not the sandbox's"
    assert (sorted(os.listdir(tiny / "etc")), resolv.is_symlink()) == before


# O: the host


O56 = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0
assert libc.mount(b"none", b"/", None, 1 << 20 | 1 << 14, None) == 0 or print(os.strerror(ctypes.get_errno()))
at = sys.argv[1]
os.mkdir(at + "/base"); assert libc.mount(b"none", (at + "/base").encode(), b"tmpfs", 0, None) == 0
open(at + "/base/f", "w").write("x")
os.mkdir(at + "/base/sub")
assert libc.mount(b"none", (at + "/base/sub").encode(), b"tmpfs", 0, None) == 0
import nsbox
nsbox.run(["true"])
def mounts(): return open("/proc/self/mountinfo").read()
before, during = mounts(), []
assert "shared:" in before
options = dict(ro=[(at + "/base", "/m")], rw=[(at + "/base/sub", "/n")], tmpfs="/t")
options["on_stdout"] = lambda _: during.append(mounts())
result = nsbox.run(["sh", "-c", "cat /m/f; echo; sleep 0.1; echo"], **options)
nsbox.run(["sh", "-c", "echo; sleep 60"], timeout=0.3, on_stdout=options["on_stdout"], workspace=at + "/base/sub")
after = mounts()
print(result.ok, set(during) == {before}, after == before)
print(libc.umount2((at + "/base/sub").encode(), 0), libc.umount2((at + "/base").encode(), 0))
"""


@pytest.mark.root
def test_O56_a_shared_root_mount_stays_as_it_is(tmp_path: Path) -> None:
    with open("/proc/1/mountinfo") as file:
        before = file.read()
    made = subprocess.run([sys.executable, "-c", O56, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    assert made.stdout == "True True True\n0 0\n", made.stdout
    with open("/proc/1/mountinfo") as file:
        assert file.read() == before


@pytest.fixture(autouse=True)
def signals_at_rest() -> Iterator[None]:
    """No case may change how this process takes signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before
    assert ctypes.CDLL(None).getpid() == os.getpid()
