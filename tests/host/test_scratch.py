"""``scratch=DIR``: what is written inside lies on a disk meanwhile, under a limit, and is gone afterwards."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import until

import nsbox
from nsbox import janitor
from nsbox.errors import SetupError, SpecError
from nsbox.resources import owned, scratch

MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in reach of every id, as those of pytest are not; empty before and after."""
    path = Path(tempfile.mkdtemp(prefix="scratch-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    janitor.flush()
    empty = until(lambda: not os.listdir(path), 30)
    shutil.rmtree(path, ignore_errors=not empty)
    assert empty


def shell(text: str, folder: Path, **options: object) -> nsbox.Result:
    return nsbox.run(["sh", "-c", text], scratch=str(folder), **options)


def touched(result: nsbox.Result) -> set[str]:
    return {hit["limit"] for hit in result.limits_hit}


def test_it_is_written_to_and_removed(folder: Path) -> None:
    result = shell("echo 1 > /tmp/a; echo 2 > a; mkdir -p x/y; chmod 0 x/y; echo 3 > /dev/shm/b; cat /tmp/a a", folder)
    assert (result.status, result.stdout) == (0, b"1\n2\n"), result.stderr
    assert result.enforced["disk"]["strength"] == "watched"
    assert result.usage["disk_used_bytes"]


def test_its_name_tells_the_owner_and_nobody_else_may_enter(folder: Path) -> None:
    seen: list[tuple[str, int]] = []

    def look(_: bytes) -> None:
        seen.extend((name, (folder / name).stat().st_mode & 0o777) for name in os.listdir(folder))

    nsbox.run(["sh", "-c", "echo; sleep 0.2"], scratch=str(folder), on_stdout=look)
    (name, mode), *others = seen
    assert name.startswith(f"nsbox-{os.getpid()}-")
    assert mode == 0o700
    assert others == []


@pytest.mark.parametrize(
    "text",
    [
        "head -c 90M /dev/zero > x; sleep 9",
        "i=0; while :; do i=$((i+1)); head -c 3M /dev/zero > x$i; sleep 0.05; done",
        "exec 3<>x; rm x; head -c 9M /dev/zero >&3; exec 4<>x; rm x; head -c 9M /dev/zero >&4; sleep 9",
        "mkdir h; i=0; while :; do i=$((i+1)); chmod 700 h; head -c 3M /dev/zero > h/$i; chmod 0 h; sleep 0.05; done",
    ],
    ids=["one file", "many", "removed", "hidden"],
)
def test_its_size_is_watched(folder: Path, text: str) -> None:
    result = shell(text, folder, disk="16M", timeout=15)
    assert (result.reason, touched(result)) == ("disk", {"disk"})


def test_a_closed_directory_is_no_reason_to_be_ended(folder: Path) -> None:
    assert shell("mkdir h; chmod 0 h; sleep 0.3", folder, disk="1G").ok


def test_a_deep_tree_goes_too(folder: Path) -> None:
    code = "import os\nfor _ in range(2500): os.mkdir('d'); os.chdir('d')\nopen('f', 'w')\nos.chmod('.', 0)"
    assert nsbox.run(["python3", "-c", code], scratch=str(folder)).ok


def test_bad_directories_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(SpecError, match=f"scratch: '{place}'"):
            nsbox.run(["true"], scratch=str(place))


@pytest.mark.root
def test_a_directory_out_of_reach_is_named(tmp_path: Path) -> None:
    (tmp_path / "closed" / "s").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    with pytest.raises(SetupError, match=r"chmod a\+x"):
        nsbox.run(["true"], scratch=str(tmp_path / "closed" / "s"))


KILLED = """
import os, signal, sys, nsbox
nsbox.run(["sh", "-c", "mkdir -p a/b; echo 1 > a/b/c; chmod 0 a; echo; sleep 60"], scratch=sys.argv[1],
          on_stdout=lambda _: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.mark.leaves_traces
def test_gc_removes_what_a_killed_process_left(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)])
    process.wait()
    left = os.listdir(folder)
    assert [name.split("-")[:2] for name in left] == [["nsbox", str(process.pid)]]
    foreign = f"nsbox-{process.pid}-99-{'0' * 12}"
    (folder / foreign).symlink_to("/etc")
    time.sleep(0.3)  # until the last process inside is gone
    subprocess.run([sys.executable, "-m", "nsbox", "gc"], capture_output=True, check=True, cwd="/")
    (folder / foreign).unlink()
    assert os.listdir(folder) == []


def test_a_living_owner_is_left_alone(folder: Path) -> None:
    swept: list[str] = []
    nsbox.run(["sh", "-c", "echo; sleep 0.2"], scratch=str(folder), on_stdout=lambda _: swept.extend(sweep(folder)))
    assert swept == []


def sweep(folder: Path) -> list[str]:
    return owned.sweep(str(folder), scratch.PREFIX, scratch._ours)


def test_others_directories_and_locked_ones_stay(folder: Path) -> None:
    import fcntl

    path = folder / "nsbox-4194304-1-0123456789ab"  # pids are smaller than that (proc_sys_kernel(5))
    path.mkdir()
    assert owned.sweep(str(folder), scratch.PREFIX, lambda _: False) == []
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert sweep(folder) == []
    os.close(fd)
    assert sweep(folder) == [str(path)]


def test_removing_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "file").touch()
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    for place in (tree, tree / "a", tree / "a" / "b"):
        (place / "link").symlink_to(tmp_path / "keep")
        (place / "n1").mkdir()
        (place / "n1" / "n1").touch()
    os.mkfifo(tree / "fifo")
    (tree / "a").chmod(0)
    fd = os.open(tmp_path, os.O_PATH)
    assert owned.remove(fd, "tree")
    assert owned.remove(fd, "tree")  # nothing left is as good
    os.close(fd)
    assert os.listdir(tmp_path) == ["keep"]
    assert os.listdir(tmp_path / "keep") == ["file"]
