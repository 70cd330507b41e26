"""Export and apply: nothing planted is followed, nothing of the host is overwritten unseen."""

import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsbox import changes, copying, diff, transfer, tree
from nsbox.change import ChangeSet
from nsbox.errors import SpecError


class Box:
    """Directories in the place of an overlay's, and the change set between them."""

    def __init__(self, top: Path) -> None:
        self.top, self.upper, self.lower, self.out = top, top / "upper", top / "lower", top / "out"
        self.upper.mkdir()
        self.lower.mkdir()
        self.fd = os.open(self.upper, tree.DIRECTORY)

    def scan(self) -> ChangeSet:
        return changes.scan(self.fd, str(self.lower))

    def export(self, **options: Any) -> transfer.Exported:
        return transfer.export(self.scan(), self.fd, str(self.out), **options)

    def apply(self, found: ChangeSet | None = None, **options: Any) -> transfer.Applied:
        return transfer.apply(found or self.scan(), self.fd, str(self.lower), **options)

    def diff(self, **options: Any) -> str:
        return diff.unified(self.scan(), self.fd, str(self.lower), **options)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    yield box
    os.close(box.fd)


def write(path: Path, text: str = "x", mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


# ---- export ----------------------------------------------------------------------------------------------------------


def test_F06_a_planted_link_is_not_followed(box: Box) -> None:
    write(box.top / "secret/key", "host secret")
    (box.upper / "dir").symlink_to(box.top / "secret")
    (box.upper / "file").symlink_to(box.top / "secret/key")
    (box.upper / "up").symlink_to("../secret/key")
    (box.upper / "fine").symlink_to("sub/target")
    result = box.export()
    assert result.copied == ("fine",)
    assert {held.path for held in result.skipped} == {"dir", "file", "up"}
    assert all("outside" in held.why for held in result.skipped)
    assert os.listdir(box.out) == ["fine"]


@pytest.mark.parametrize("swap", ["file", "directory"])
def test_F06_a_link_swapped_in_after_the_scan_is_not_followed(box: Box, swap: str) -> None:
    write(box.top / "secret/key", "host secret")
    write(box.upper / "dir/key", "own")
    found = box.scan()
    if swap == "file":
        (box.upper / "dir/key").unlink()
        (box.upper / "dir/key").symlink_to(box.top / "secret/key")
    else:
        (box.upper / "dir").rename(box.upper / "moved")
        (box.upper / "dir").symlink_to(box.top / "secret")
    result = transfer.export(found, box.fd, str(box.out))
    assert [held.path for held in result.skipped] == ["dir/key"]
    assert not (box.out / "dir/key").exists()


def test_F06_what_changed_after_the_scan_is_not_exported(box: Box) -> None:
    write(box.upper / "a", "looked at")
    found = box.scan()
    write(box.upper / "a", "something else")
    result = transfer.export(found, box.fd, str(box.out))
    assert "after it was looked at" in result.skipped[0].why
    assert os.listdir(box.out) == []


@pytest.mark.parametrize("path", ["../a", "/etc/a", "a/../../b", "", "a//b", "."])
def test_F05_a_path_that_leads_elsewhere_is_skipped(box: Box, path: str) -> None:
    write(box.upper / "a")
    (entry,) = box.scan().entries
    result = transfer.export(ChangeSet((entry._replace(path=path),)), box.fd, str(box.out))
    assert result.copied == ()
    assert os.listdir(box.out) == []
    applied = box.apply(ChangeSet((entry._replace(path=path),)))
    assert applied.applied == ()


@pytest.mark.parametrize(
    "path, target, inside",
    [
        ("a", "b", True),
        ("a", "./b/c", True),
        ("d/a", "../b", True),
        ("a", "../b", False),
        ("d/a", "../../b", False),
        ("a", "/b", False),
        ("a", "b/../c", False),
        ("d/e/a", "b/../../../c", False),
        ("a", "", False),
        ("d/e/a", "../../b", True),
    ],
)
def test_links_that_stay_inside(path: str, target: str, inside: bool) -> None:
    assert copying.stays_inside(path, target) == inside


def test_special_files_are_only_listed(box: Box) -> None:
    os.mkfifo(box.upper / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(box.upper / "sock"))
    result = box.export()
    assert result.copied == ()
    assert {item["kind"] for item in result.manifest} == {"fifo", "socket"}
    assert os.listdir(box.out) == []


def test_modes_and_owner(box: Box) -> None:
    write(box.upper / "setuid", mode=0o6777)
    write(box.upper / "plain", mode=0o640)
    write(box.upper / "dir/in")
    (box.upper / "dir").chmod(0o1577)
    if os.geteuid() == 0:
        os.chown(box.upper / "plain", 12345, 12345)
    box.export()
    modes = {name: stat.S_IMODE(os.stat(box.out / name).st_mode) for name in ("setuid", "plain", "dir")}
    assert modes == {"setuid": 0o775, "plain": 0o640, "dir": 0o775}
    assert os.stat(box.out / "plain").st_uid == os.geteuid()


def test_holes_stay_holes(box: Box) -> None:
    with open(box.upper / "sparse", "wb") as file:
        file.seek(32 << 20)
        file.write(b"end")
        file.truncate(64 << 20)
    box.export()
    assert (box.out / "sparse").read_bytes() == (box.upper / "sparse").read_bytes()
    assert os.stat(box.out / "sparse").st_blocks * 512 < 1 << 20


def test_caps(box: Box) -> None:
    for number in range(5):
        write(box.upper / str(number), "x" * 100)
    result = box.export(caps=transfer.Caps(entries=10, bytes=250))
    assert result.copied == ("0", "1")
    assert len(result.skipped) == 3
    box.out = box.top / "again"
    assert len(box.export(caps=transfer.Caps(entries=4)).copied) == 4


def test_an_export_goes_to_a_directory_of_its_own(box: Box) -> None:
    write(box.upper / "a")
    box.export()
    with pytest.raises(SpecError, match="not empty"):
        box.export()
    with pytest.raises(SpecError, match="not a directory"):
        transfer.export(box.scan(), box.fd, str(box.out / "a"))
    (box.top / "empty").mkdir()
    (box.top / "link").symlink_to(box.top / "empty")
    for path in ("link", "link/"):
        with pytest.raises(SpecError, match="no link"):
            transfer.export(box.scan(), box.fd, f"{box.top}/{path}")


def test_F12_what_the_host_would_trust_is_held_back(box: Box) -> None:
    for name in (".git/hooks/pre-commit", ".git/config", ".envrc", "src/a.py", ".vscode/tasks.json"):
        write(box.upper / name)
    result = box.export()
    assert {held.path for held in result.held_back} == {
        ".git/config",
        ".git/hooks/pre-commit",
        ".envrc",
        ".vscode/tasks.json",
    }
    assert "src/a.py" in result.copied
    assert not (box.out / ".envrc").exists()
    applied = box.apply(allow_trusted={".envrc", ".git/hooks"})
    assert {held.path for held in applied.held_back} == {".git/config", ".vscode/tasks.json"}
    assert (box.lower / ".git/hooks/pre-commit").exists()
    assert not (box.lower / ".git/config").exists()


# ---- apply -----------------------------------------------------------------------------------------------------------


def test_apply_replaces_in_one_step(box: Box) -> None:
    write(box.lower / "a", "old", 0o600)
    write(box.upper / "a", "new", 0o600)
    before = os.stat(box.lower / "a").st_ino
    with open(box.lower / "a") as reader:
        assert box.apply().applied == ("a",)
        assert reader.read() == "old"
    assert (box.lower / "a").read_text() == "new"
    assert os.stat(box.lower / "a").st_ino != before
    assert os.listdir(box.lower) == ["a"]


def test_apply_picks_by_path(box: Box) -> None:
    for name in ("src/a", "src/b", "doc/c"):
        write(box.upper / name)
    assert box.apply(paths=["src", "nothing"]).applied == ("src", "src/a", "src/b")
    assert box.apply(paths=["doc/c"]).applied == ("doc/c",)


@pytest.mark.parametrize("how", ["content", "inode", "gone", "kind", "appeared", "parent"])
def test_a_conflict_is_left_alone(box: Box, how: str) -> None:
    write(box.lower / "dir/a", "old")
    write(box.upper / "dir/a", "new")
    write(box.upper / "b", "new")
    found = box.scan()
    place = box.lower / "dir/a"
    if how == "content":
        place.write_text("host's own")
    elif how == "inode":
        status = place.stat()
        place.rename(box.top / "x")
        place.write_text("lod")
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif how == "gone":
        place.unlink()
    elif how == "kind":
        place.unlink()
        place.symlink_to(box.top / "elsewhere")
    elif how == "appeared":
        (box.lower / "b").write_text("host's own")
    else:
        (box.lower / "dir").rename(box.top / "moved")
        (box.lower / "dir").symlink_to(box.top / "moved")
    result = box.apply(found)
    (conflict,) = result.conflicts
    assert conflict.path == ("b" if how == "appeared" else "dir/a")
    assert "meanwhile" in conflict.why or "since" in conflict.why
    assert not (box.top / "elsewhere").exists()
    assert not (box.top / "moved/a").exists() or (box.top / "moved/a").read_text() == "old"
    if how in ("content", "gone", "appeared"):
        assert box.apply(found, force=True).conflicts == ()
        assert (box.lower / conflict.path).read_text() == "new"


def test_a_change_between_launch_and_scan_is_a_conflict(box: Box) -> None:
    write(box.lower / "early", "old")
    write(box.lower / "late", "old")
    time.sleep(0.02)
    launched = time.time_ns()
    time.sleep(0.02)
    status = (box.lower / "late").stat()
    write(box.lower / "late", "lod")
    os.utime(box.lower / "late", ns=(status.st_atime_ns, status.st_mtime_ns))
    for name in ("early", "late"):
        write(box.upper / name, "new")
    result = box.apply(since_ns=launched)
    assert result.applied == ("early",)
    assert [held.path for held in result.conflicts] == ["late"]
    assert "started" in result.conflicts[0].why


@pytest.mark.root
def test_deletions(box: Box) -> None:
    for name in ("dir/sub/a", "dir/b", "c"):
        write(box.lower / name)
    for name in ("dir", "c"):
        os.mknod(box.upper / name, 0o020000, os.makedev(0, 0))
    found = box.scan()
    write(box.lower / "dir/new", "host's own")
    result = box.apply(found)
    assert set(result.applied) == {"c", "dir/b", "dir/sub", "dir/sub/a"}
    assert [held.path for held in result.conflicts] == ["dir"]
    assert (box.lower / "dir/new").read_text() == "host's own"


@pytest.mark.root
def test_what_root_applies_belongs_to_the_owner_of_the_place(box: Box) -> None:
    write(box.lower / "a", "old")
    os.chown(box.lower, 1234, 1235)
    os.chown(box.lower / "a", 2234, 2235)
    write(box.upper / "a", "new")
    write(box.upper / "new/deep/file")
    box.apply(paths=["a", "new/deep/file"])
    owners = [
        (path.stat().st_uid, path.stat().st_gid)
        for path in (box.lower / "a", box.lower / "new", box.lower / "new/deep/file")
    ]
    assert owners == [(2234, 2235), (1234, 1235), (1234, 1235)]


def test_an_incomplete_set_is_not_applied(box: Box) -> None:
    write(box.upper / "a")
    found = box.scan()._replace(truncated=("more than 7 changes",))
    with pytest.raises(SpecError, match="more than 7"):
        box.apply(found)
    assert box.apply(found, paths=["a"]).applied == ("a",)


# ---- diff ------------------------------------------------------------------------------------------------------------


def test_diff(box: Box) -> None:
    write(box.lower / "a", "one\ntwo\n")
    write(box.upper / "a", "one\n2\nthree", 0o755)
    write(box.upper / "new", "n\n")
    write(box.upper / ".envrc", "export X\n")
    (box.upper / "bin").write_bytes(b"a\0b")
    (box.upper / "big").write_bytes(b"x" * (diff.MAX_FILE_BYTES + 1))
    (box.upper / "link").symlink_to("/etc/passwd")
    lines = box.diff().splitlines()
    assert lines[lines.index("modified file a (mode 0644 to 0755)") + 1 :][:8] == [
        "--- a/a",
        "+++ b/a",
        "@@ -1,2 +1,3 @@",
        " one",
        "-two",
        "+2",
        "+three\\ (no newline at the end)",
        "added file big",
    ]
    for line in ("  (binary, 3 bytes)", "+n", "added symlink link (leads to /etc/passwd)"):
        assert line in lines
    assert any(line.startswith("! held back unless allowed by name") for line in lines)
    assert any("too large to show" in line for line in lines)


def test_diff_shows_what_would_hide(box: Box) -> None:
    write(box.upper / "a", "\x1b[2Jgone\r\u202edne\x9b\u200b\tü\u2028\n")
    (box.upper / "raw").write_bytes(b"\xff\n")
    text = box.diff()
    assert "+\\x1b[2Jgone\\x0d\\u202edne\\x9b\\u200b\tü\\u2028" in text.splitlines()
    assert "+\\xff" in text.splitlines()


def test_diff_is_bounded(box: Box) -> None:
    for number in range(100):
        write(box.upper / f"{number:03}", "line\n" * 100)
    text = box.diff(max_bytes=5000)
    assert len(text) < 8000
    assert "more changes are not shown" in text
    write(box.upper / "long", "\n" * (diff.MAX_FILE_LINES + 1))
    assert "too long to show" in box.diff(max_bytes=1 << 20)
