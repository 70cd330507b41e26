"""The paths that ``Files`` takes, on a directory that stands for a sandbox's root: nothing leads out of it."""

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsbox.errors import SpecError
from nsbox.files import Files
from nsbox.find import _fits

SECRET = b"of the host"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Path, Files]]:
    """(the directory that stands for the root, its files); the secret lies beside it."""
    (tmp_path / "secret").write_bytes(SECRET)
    root = tmp_path / "root"
    (root / "home").mkdir(parents=True)
    fd = os.open(root, os.O_PATH)
    try:
        yield root, Files(fd, None, "/home")
    finally:
        os.close(fd)


ESCAPES = ("../../../secret", "/../secret", "../secret", "{outside}/secret", "/proc/self/root{outside}/secret")


@pytest.mark.parametrize("target", ESCAPES)
@pytest.mark.parametrize("depth", [1, 2])
def test_no_link_leads_out(place: tuple[Path, Files], target: str, depth: int) -> None:
    root, files = place
    target = target.format(outside=root.parent)
    os.symlink(target, root / "home" / "link1")
    os.symlink("link1", root / "home" / "link2")
    os.symlink(os.path.dirname(target) or "..", root / "home" / "folder")
    for path in (f"link{depth}", target, "folder/secret", "folder/../secret"):
        with pytest.raises(OSError):
            files.read_file(path)
    for path in (f"link{depth}", "folder/new"):
        try:
            files.write_file(path, "overwritten")
        except OSError:
            continue
    assert (root.parent / "secret").read_bytes() == SECRET
    assert sorted(os.listdir(root.parent)) == ["root", "secret"]


def test_removing_a_link_leaves_what_it_leads_to(place: tuple[Path, Files]) -> None:
    root, files = place
    (root / "kept").mkdir()
    (root / "kept/file").write_text("x")
    os.symlink("/kept", root / "home/link")
    os.symlink("/kept", root / "home/kept2")
    files.remove("link", recursive=True)
    files.mkdir("tree/deep")
    os.symlink("/kept", root / "home/tree/deep/link")
    files.remove("tree", recursive=True)
    assert (root / "kept/file").read_text() == "x"
    assert [item.name for item in files.list()] == ["kept2"]


def test_errors_are_the_usual_ones(place: tuple[Path, Files]) -> None:
    root, files = place
    files.write_file("file", b"x")
    for error, call in (
        (FileNotFoundError, lambda: files.read_file("none")),
        (FileNotFoundError, lambda: files.list("none")),
        (FileNotFoundError, lambda: files.remove("none")),
        (IsADirectoryError, lambda: files.read_file("/home")),
        (IsADirectoryError, lambda: files.write_file("/home", b"")),
        (NotADirectoryError, lambda: files.list("file")),
        (NotADirectoryError, lambda: files.write_file("file/below", b"")),
        (OSError, lambda: files.remove("/")),
        (OSError, lambda: files.remove("..")),
        (SpecError, lambda: files.read_file("a\0b")),
        (SpecError, lambda: files.read_file("")),
    ):
        with pytest.raises(error):
            call()
    os.mkfifo(root / "home/fifo")
    for call in (lambda: files.read_file("fifo"), lambda: files.write_file("fifo", b"")):
        with pytest.raises(OSError):
            call()
    files.write_file("long", b"1234")
    with pytest.raises(OSError, match="longer than 3"):
        files.read_file("long", max_bytes=3)


names = st.sampled_from(["a", "b", "..", ".", "", "link", "up", "abs", "loop", "a" * 300, "\udcff", "é"])
paths = st.lists(names, min_size=1, max_size=6).map("/".join)


@given(path=paths, other=paths, data=st.binary(max_size=20))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_path_nothing_outside_changes(path: str, other: str, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as top:
        base = Path(top)
        (base / "secret").write_bytes(SECRET)
        root = base / "root"
        (root / "home/a").mkdir(parents=True)
        for name, target in (("link", "a"), ("up", "../.."), ("abs", top), ("loop", "loop")):
            os.symlink(target, root / "home" / name)
        fd = os.open(root, os.O_PATH)
        files = Files(fd, None, "/home")
        os.close(fd)
        for call in (
            lambda: files.write_file(path, data),
            lambda: files.rename(path, other),
            lambda: files.mkdir(other),
            lambda: files.read_file(other),
            lambda: files.list(path),
            lambda: files.walk(path),
            lambda: files.stat(path),
            lambda: files.glob(path),
            lambda: files.remove(path, recursive=True),
        ):
            try:
                answer = call()
            except (OSError, ValueError):
                continue
            assert answer != SECRET
        assert (base / "secret").read_bytes() == SECRET
        assert sorted(os.listdir(base)) == ["root", "secret"]


@pytest.mark.parametrize(
    ("path", "pattern", "fits"),
    [
        ("a.py", "*.py", True),
        ("x/a.py", "*.py", False),
        ("x/a.py", "*/*.py", True),
        ("x/y/a.py", "**/*.py", True),
        ("a.py", "**/*.py", True),
        ("x/y", "**", True),
        ("x/y/z", "x/**/z", True),
        ("x/z", "x/**/z", True),
        ("x/y/w", "x/**/z", False),
        (".hid", "*", True),
        ("ab", "[!a]b", False),
        ("cb", "[!a]b", True),
        ("/".join("a" * 100), "/".join(["**", "a"] * 20), True),
        ("/".join("a" * 100), "/".join(["**", "a"] * 20 + ["b"]), False),
    ],
)
def test_patterns(path: str, pattern: str, fits: bool) -> None:
    assert _fits(path.split("/"), pattern.split("/")) is fits


def archive(*members: tuple[str, bytes, str], content: bytes = b"") -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode = kind, link, 0o7777
            info.size = len(content) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(content) if info.size else None)
    out.seek(0)
    return out


def test_a_hostile_archive_stays_within_its_target(place: tuple[Path, Files]) -> None:
    root, files = place
    regular, link = tarfile.REGTYPE, tarfile.SYMTYPE
    stream = archive(
        ("../evil", regular, ""),
        ("/absolute", regular, ""),
        ("a/../../evil", regular, ""),
        ("link", link, "/"),
        ("link/through", regular, ""),
        ("out", link, "../../.."),
        ("hard", tarfile.LNKTYPE, "../secret"),
        ("node", tarfile.CHRTYPE, ""),
        ("good", regular, ""),
        content=b"content",
    )
    skipped = files.put_tar(stream, "/target")
    assert {item.path for item in skipped} == {"../evil", "/absolute", "a/../../evil", "hard", "node"}
    assert (root / "through").read_bytes() == b"content"  # a link inside leads inside
    assert (root / "target/good").stat().st_mode & 0o7777 == 0o777
    assert sorted(os.listdir(root.parent)) == ["root", "secret"]
    assert sorted(os.listdir(root)) == ["home", "target", "through"]


def test_trees_go_in_and_come_out(place: tuple[Path, Files], tmp_path: Path) -> None:
    root, files = place
    source = tmp_path / "source"
    (source / "sub/empty").mkdir(parents=True)
    (source / "sub/file").write_bytes(b"1" * 3_000_000)
    (source / "run").write_text("#!/bin/sh\n")
    (source / "run").chmod(0o755)
    os.symlink("sub/file", source / "link")
    os.symlink("/etc/passwd", source / "outside")
    os.mkfifo(source / "fifo")
    assert [item.path for item in files.upload(source, "tree")] == ["fifo"]
    assert os.readlink(root / "home/tree/outside") == "/etc/passwd"
    assert (root / "home/tree/run").stat().st_mode & 0o777 == 0o755
    skipped = files.download("tree", tmp_path / "out")
    assert [item.path for item in skipped] == ["outside"]
    assert (tmp_path / "out/sub/file").read_bytes() == b"1" * 3_000_000
    assert (tmp_path / "out/link").is_symlink()
    assert (tmp_path / "out/sub/empty").is_dir()
    with pytest.raises(FileExistsError):
        files.download("tree", tmp_path / "out")
    stream = io.BytesIO()
    files.get_tar("tree", stream)
    stream.seek(0)
    assert files.put_tar(stream, "again") == []
    assert files.read_file("again/link") == b"1" * 3_000_000
    files.upload(source / "run", "again/run")
    assert files.read_file("again/run") == b"#!/bin/sh\n"


def test_looking_for_files(place: tuple[Path, Files]) -> None:
    _, files = place
    files.write_file("src/a.py", "import os\nprint('needle')\n")
    files.write_file("src/deep/b.py", "x = 'Needle'\n")
    files.write_file("src/c.bin", b"needle\0")
    files.write_file("src/d.txt", b"\xff needle\r\n")
    assert files.glob("src/**/*.py") == ["src/a.py", "src/deep/b.py"]
    assert files.glob("/home/src/*.py") == ["/home/src/a.py"]
    assert files.glob("*") == ["src"]
    assert files.glob("none/*") == []
    assert files.glob("src/a.py") == ["src/a.py"]
    assert [(match.path, match.line) for match in files.grep("needle", "src")] == [("src/a.py", 2), ("src/d.txt", 1)]
    assert len(files.grep("needle", "src", names="*.py", ignore_case=True)) == 2
    assert len(files.grep("e", "src", max_matches=1)) == 1
    assert files.grep("needle", "src/a.py")[0].text == "print('needle')"


def test_a_walk_is_bounded(place: tuple[Path, Files]) -> None:
    root, files = place
    for number in range(20):
        (root / f"home/{number}").touch()
    with pytest.raises(OSError, match="more than 10"):
        files.walk(max_entries=10)
    os.symlink("..", root / "home/around")
    assert len(files.walk("/")) == 22
    fd = os.open(root / "home", os.O_RDONLY)
    for _ in range(200):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    assert len(files.walk("/")) < 200
    with pytest.raises(OSError, match="deep"):
        files.remove("d", recursive=True)
