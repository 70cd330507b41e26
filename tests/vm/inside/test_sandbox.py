"""What a sandbox is and which limits hold, on this kernel, for this caller, with these control groups.

Emulation is some twenty times slower than a processor, so time limits are long and no time is asserted closely.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nsbox
from nsbox.errors import HostError, NsboxError

MIB = 1 << 20
ROOT = os.geteuid() == 0
KERNEL = tuple(map(int, os.uname().release.split(".")[:2]))
CGROUP = os.environ.get("NSBOX_VM_CGROUP", "")
STRENGTH = "watched" if CGROUP == "none" else "kernel"
#: file system → (a directory on it, the first kernel on which root can show it under other ids)
PLACES = {"ext4": ("/mnt/disk", (5, 12)), "tmpfs": ("/mnt/memory", (6, 3)), "overlay": ("/mnt/root", (99, 0))}


def run(*argv: str, **options: Any) -> nsbox.Result:
    return nsbox.run(argv, **{"timeout": "5m", "cpu_time": "5m", **options})


def shell(text: str, **options: Any) -> nsbox.Result:
    return run("sh", "-c", text, **options)


def touched(result: nsbox.Result) -> set[str]:
    return {hit["limit"] for hit in result.limits_hit}


def test_strengths() -> None:
    result = run("true")
    assert result.ok
    assert {result.enforced[limit]["strength"] for limit in ("memory", "pids", "cpu")} == {STRENGTH}
    assert result.enforced["landlock"]["strength"] == "kernel"
    assert result.enforced["disk"]["strength"] == "kernel"


def test_insisting_on_the_kernel() -> None:
    if STRENGTH == "kernel":
        assert run("true", require=["memory=kernel", "pids=kernel", "cpu=kernel"]).ok
        return
    with pytest.raises(HostError, match=r"memory: kernel is required.*sudo sh -c") as caught:
        run("true", require=["memory=kernel"])
    assert "cgroup" in str(caught.value)


def test_identity_and_root() -> None:
    result = shell("id -u; hostname; echo $$; cat /proc/self/cgroup; echo x >~/x; echo x >/tmp/x; ! echo x >/usr/x")
    lines = result.stdout_text.splitlines()
    assert lines[:2] == ["1000", "nsbox"]
    assert int(lines[2]) < 10
    assert all(line.endswith(":/") for line in lines[3:]), lines
    assert result.ok, result.stderr_text


def test_programs() -> None:
    result = shell("python3 -c 'import ssl, json; print(6 * 7)'; echo a | sed s/a/b/; seq 3 | sort -r | head -1")
    assert result.stdout_text.split() == ["42", "b", "3"], result.stderr_text


def test_memory() -> None:
    result = run("python3", "-c", "bytearray(300 << 20)", memory="64M")
    assert result.reason == "memory"
    assert "memory" in touched(result)


def test_memory_of_a_child_while_the_shell_goes_on() -> None:
    result = shell("python3 -c 'bytearray(300 << 20)'; exit 0", memory="64M")
    assert result.reason == "memory"


def test_reserved_memory_is_free() -> None:
    code = "import mmap; mmap.mmap(-1, 8 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)"
    assert run("python3", "-c", code, memory="128M").ok


def test_files_count_as_memory_or_disk() -> None:
    result = shell("dd if=/dev/zero of=/dev/shm/f bs=1M count=200", memory="64M", disk="128M")
    assert touched(result) & {"memory", "disk"}


def test_processes() -> None:
    code = """if True:
        import os, time
        made = 0
        try:
            for _ in range(40):
                if os.fork() == 0:
                    time.sleep(5)
                    os._exit(0)
                made += 1
        except BlockingIOError:
            print(made)
            time.sleep(1)
        """
    result = run("python3", "-c", code, pids=12)
    assert 8 <= int(result.stdout_text) <= 12
    assert "pids" in touched(result)


def test_processors() -> None:
    code = """if True:
        import time
        until = time.monotonic() + 2
        while time.monotonic() < until:
            pass
        print(time.process_time())
        """
    result = run("python3", "-c", code, cpus=0.5)
    assert float(result.stdout_text) < 1.6
    assert "cpu" in touched(result)


def test_disk() -> None:
    result = shell("dd if=/dev/zero of=/tmp/f bs=1M count=64 2>&1", disk="8M")
    assert "No space left" in result.stdout_text
    assert "disk" in touched(result)


def test_wall_clock() -> None:
    result = shell("trap '' TERM; sleep 600 & kill -STOP $$", timeout=3)
    assert result.reason == "timeout"


def test_processor_time() -> None:
    result = shell("while :; do :; done", cpu_time=1)
    assert result.reason == "cpu_time"


def test_output_is_cut() -> None:
    result = shell("yes | head -c 3000000", output="1M")
    assert result.stdout_truncated
    assert len(result.stdout) == MIB


@pytest.fixture(params=PLACES)
def source(request: pytest.FixtureRequest) -> Iterator[tuple[Path, bool]]:
    """(a small tree on that file system, whether this caller can have it under its own ids)."""
    place, since = PLACES[request.param]
    if not os.path.ismount(place) and request.param == "ext4":
        pytest.skip("no disk: mkfs.ext4 is not installed")
    folder = Path(tempfile.mkdtemp(dir=place))
    folder.chmod(0o755)
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("hello\n")
    (folder / "sub" / "file").chmod(0o600)
    yield folder, not ROOT or since <= KERNEL
    shutil.rmtree(folder)


def refused(folder: Path) -> None:
    with pytest.raises(NsboxError, match="does not take idmapped mounts") as caught:
        run("true", rw=[(folder, "/work")])
    assert str(folder) in str(caught.value)


def copied(result: nsbox.Result) -> bool:
    """Whether the workspace is a copy, for want of idmapped mounts."""
    return "the workspace is a copy" in result.enforced["overlay"]["how"]


def test_read_only(source: tuple[Path, bool]) -> None:
    folder, mapped = source
    result = shell("cat /m/sub/file; ! touch /m/x", ro=[(folder, "/m")])
    if mapped:
        assert result.ok
        assert result.stdout == b"hello\n"


def test_read_write(source: tuple[Path, bool]) -> None:
    folder, mapped = source
    if not mapped:
        refused(folder)
        return
    result = shell(
        "stat -c %u /work/sub; cat /work/sub/file; echo more >>/work/sub/file; touch /work/x", rw=[(folder, "/work")]
    )
    assert result.stdout_text.split() == ["1000", "hello"], result.stderr_text
    assert (folder / "sub" / "file").read_text() == "hello\nmore\n"
    assert (folder / "x").stat().st_uid == os.geteuid()


def test_workspace(source: tuple[Path, bool]) -> None:
    folder, mapped = source
    result = shell("cat sub/file; echo more >>sub/file; touch x; mkdir -p d/e; rm sub/file; ls", workspace=folder)
    assert result.stdout_text.split() == ["hello", "d", "sub", "x"], result.stderr_text
    assert (folder / "sub" / "file").read_text() == "hello\n"
    assert not (folder / "x").exists()
    assert copied(result) != mapped


def test_workspace_directories_come_and_go(source: tuple[Path, bool]) -> None:
    folder, _ = source
    result = shell("rm -r sub && mkdir sub && ls sub && mv sub other && ls", workspace=folder)
    assert result.ok, result.stderr_text
    assert result.stdout == b"other\n"


@pytest.mark.root
def test_workspace_where_var_tmp_is_an_overlay() -> None:
    """As in a container: there, before Linux 6.6, directories cannot be removed, but everything else works."""
    if not os.path.ismount("/var/tmp"):
        pytest.skip("no disk: mkfs.ext4 is not installed")
    with tempfile.TemporaryDirectory(dir="/mnt/disk") as name:
        Path(name, "file").write_text("hello\n")
        code = f"import nsbox; print(nsbox.run(['cat', 'file'], workspace={name!r}).check().stdout_text)"
        command = ["unshare", "--mount", "sh", "-c", 'umount /var/tmp && exec "$@"', "sh", sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "hello", done.stderr


def test_the_same_with_scratch_on_disk() -> None:
    if not os.path.ismount("/mnt/disk"):
        pytest.skip("no disk: mkfs.ext4 is not installed")
    with tempfile.TemporaryDirectory(dir="/mnt/disk") as name:
        # A root caller's sandbox has ids of its own, which must be able to pass.
        os.chmod(name, 0o755)
        source, scratch = Path(name, "source"), Path(name, "scratch")
        scratch.mkdir()
        (source / "sub").mkdir(parents=True)
        (source / "sub" / "file").touch()
        result = shell("rm -r sub && mkdir sub && ls sub && mv sub other && ls", workspace=source, scratch=scratch)
        assert result.ok, result.stderr_text
        assert result.stdout == b"other\n"
        assert (source / "sub" / "file").exists()
        deadline = time.monotonic() + 20
        while list(scratch.iterdir()):  # removed off the caller's path
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_git(source: tuple[Path, bool]) -> None:
    folder, _ = source
    subprocess.run(["git", "init", "-q", folder], check=True)
    text = "git add . && git -c user.name=a -c user.email=a@b commit -qm x && git clone -q . /tmp/c && ls /tmp/c"
    result = shell(text, workspace=folder)
    assert result.stdout == b"sub\n", result.stderr_text


@pytest.mark.parametrize("place", ["/root/a/b", "/home/other/x", "/opt/x", "/srv/x", "/etc/x", "/var/lib/x"])
def test_a_place_for_a_mount(place: str) -> None:
    result = shell(f"test -e {place}/bash && test -w /t{place}", ro=[("/usr/bin", place)], tmpfs=[f"/t{place}"])
    assert result.ok, result.stderr_text


@pytest.mark.root
def test_a_source_that_cannot_be_idmapped_is_named() -> None:
    refused(Path("/run/vm/results"))
    assert copied(run("true", workspace="/run/vm/results"))


def test_nothing_listens_and_nothing_leads_out() -> None:
    result = shell(
        "cat /proc/net/dev | wc -l; python3 -c 'import socket; socket.create_connection((\"192.0.2.1\", 80), 5)'"
    )
    assert result.stdout_text.split() == ["3"]
    assert "unreachable" in result.stderr_text


def test_many_in_a_row_leave_nothing() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    for _ in range(5):  # until what is kept ready is there
        run("true")
    time.sleep(0.5)
    before = descriptors()
    for _ in range(10):
        assert run("true").ok
    time.sleep(0.5)
    assert descriptors() <= before
