"""Readers of bytes that somebody hostile chose: whatever comes, each answers or raises what it says it raises.

Those of DNS messages, ClientHello and HTTP heads are in test_dns.py and test_peek.py, paths in test_files_paths.py,
what init says in tests/host/test_box.py, the C in tests/fuzz.
"""

import io
import json
import os
import socket
import struct
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nsbox import changes, diff, transfer, tree, trust
from nsbox.errors import NsboxError
from nsbox.files import Files
from nsbox.resources import netlink, netrecord, nft
from nsbox.shell import MAX_FACTS, _Stream
from nsbox.snapshot_tar import _NAMES, _OPAQUE, _WHITEOUT, _Reader

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])

# (where, what to put there, how many bytes it takes the place of)
edits = st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=8), st.integers(0, 8)), max_size=6)


def edited(data: bytes, changes_: list[tuple[int, bytes, int]]) -> bytes:
    """``data`` with some changes: near enough to what is right to get past the first check."""
    for place, new, gone in changes_:
        at = place % (len(data) + 1)
        data = data[:at] + new + data[at + gone :]
    return data


# ---- netlink: counters of a network namespace, as the kernel answers ------------------------------------------------


def element(key: bytes, packets: int, size: int) -> bytes:
    counter = netlink.nested(
        2, netlink.attribute(1, struct.pack("!Q", size)), netlink.attribute(2, struct.pack("!Q", packets))
    )
    expression = netlink.nested(7, netlink.attribute(1, b"counter\0"), counter)
    return netlink.nested(1, netlink.nested(1, netlink.attribute(1, key)), expression)


def answer(*bodies: bytes) -> bytes:
    """What a dump answers, in one piece."""
    rows = [netlink.message(0, 2, 1, b"\2\0\0\0" + body) for body in bodies]
    return b"".join(rows) + netlink.message(netlink.DONE, 2, 1, bytes(4))


V4_KEY = bytes((192, 0, 2, 1)) + bytes((socket.IPPROTO_TCP, 0, 0, 0)) + struct.pack("!Hxx", 443)
ELEMENTS = answer(netlink.nested(3, element(V4_KEY, 7, 4200)))
SETS = answer(netlink.attribute(2, b"deny4\0"), netlink.attribute(2, b"tx4\0"))
COUNTERS = answer(
    netlink.attribute(2, b"other\0") + netlink.nested(4, netlink.attribute(2, struct.pack("!Q", 9))),
)


class Kernel:
    """A netlink socket that answers as it was told, and then that all has been said."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = [*answers]

    def send(self, data: bytes) -> int:
        return len(data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        if flags & socket.MSG_DONTWAIT:
            raise BlockingIOError
        return self.answers.pop(0) if self.answers else netlink.message(netlink.DONE, 0, 1, bytes(4))


def asked(read: Callable[[Any], Any], *answers: bytes) -> Any:
    return read(Kernel(*answers))


def test_the_samples_are_read() -> None:
    assert asked(lambda sock: nft.counted(sock, "t", "s"), ELEMENTS) == [(V4_KEY, 7, 4200)]
    assert asked(lambda sock: nft.sets_of(sock, "t"), SETS) == ["deny4", "tx4"]
    assert asked(lambda sock: nft.counters(sock, "t"), COUNTERS) == {"other": 9}
    rows = asked(lambda sock: netrecord.refused(sock, {}), SETS, ELEMENTS, COUNTERS)
    assert [(row["address"], row["port"], row["connections"]) for row in rows] == [("192.0.2.1", 443, 7), ("", 0, 9)]


@example(changed=[], tail=netlink.message(netlink.ERROR, 0, 1, b"\xff"), which=b"")
@given(changed=edits, tail=st.binary(max_size=64), which=st.sampled_from([ELEMENTS, SETS, COUNTERS]))
def test_netlink_messages(changed: list[tuple[int, bytes, int]], tail: bytes, which: bytes) -> None:
    data = edited(which, changed) + tail
    rows = list(netlink.messages(data))
    assert sum(16 + len(body) for _, _, body in rows) <= len(data) + 16
    for _, _, body in rows:
        assert sum(len(value) for _, value in netlink.attribute_list(body)) <= len(body)
    for read in (
        lambda sock: nft.counted(sock, "t", "s"),
        lambda sock: nft.sets_of(sock, "t"),
        lambda sock: nft.counters(sock, "t"),
        lambda sock: nft.dropping_tables(sock, 3),
        lambda sock: netrecord.refused(sock, {}),
        lambda sock: netrecord.routed(sock, {}),
        lambda sock: netlink.exchange(sock, b""),
    ):
        try:
            asked(read, *[data] * 5, netlink.message(netlink.ERROR, 0, netlink.LAST, bytes(4)))
        except OSError:
            pass


# ---- the marks of a shell session -----------------------------------------------------------------------------------

MARK = b"\0" + b"0123456789abcdef" * 2 + b" "


def streamed(pieces: list[bytes], cap: int) -> tuple[bytes, bytes | None, bool]:
    stream = _Stream(cap)
    stream.begin(MARK)
    for piece in pieces:
        stream.add(piece)
    return stream.data, stream.facts, stream.truncated


near_marks = st.lists(
    st.one_of(st.binary(max_size=9), st.sampled_from([MARK, MARK[:-1], MARK[:5], b"\0", b"0 /tmp\0", b"1 /\0"])),
    max_size=9,
).map(b"".join)


@given(data=near_marks, cuts=st.lists(st.integers(0, 400), max_size=8), cap=st.sampled_from([0, 5, 1 << 20]))
@example(data=MARK + b"0 /\0", cuts=[1, 2, 33, 34, 35, 37], cap=100)
def test_marks_do_not_depend_on_how_a_stream_is_cut(data: bytes, cuts: list[int], cap: int) -> None:
    at = sorted({min(cut, len(data)) for cut in cuts})
    pieces = [data[start:end] for start, end in zip([0, *at], [*at, len(data)], strict=True)]
    kept, facts, truncated = streamed(pieces, cap)
    assert (facts, truncated) == streamed([data], cap)[1:]
    before, mark, after = data.partition(MARK)
    if mark and b"\0" in after:
        assert facts == after.partition(b"\0")[0]
        assert kept == before[:cap]
        assert truncated is (len(before) > cap)
    else:
        assert facts is None


@pytest.mark.parametrize("size", [MAX_FACTS, MAX_FACTS + 100])
def test_a_mark_without_an_end_does_not_grow(size: int) -> None:
    kept, facts, _ = streamed([b"out" + MARK, b"x" * size, b"x" * size], 1 << 20)
    assert facts == b""
    assert kept == b"out"


# ---- tar archives ---------------------------------------------------------------------------------------------------


def packed(format_: int, **headers: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format_) as archive:
        for name, kind, link in (
            ("root/d", tarfile.DIRTYPE, ""),
            ("root/d/f", tarfile.REGTYPE, ""),
            ("root/l", tarfile.SYMTYPE, "../../../x"),
            ("root/h", tarfile.LNKTYPE, "root/d/f"),
            ("root/" + "n" * 90, tarfile.REGTYPE, ""),
            ("root/p", tarfile.FIFOTYPE, ""),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size, info.mode = kind, link, 3 * (kind == tarfile.REGTYPE), 0o755
            info.pax_headers = dict(headers)
            archive.addfile(info, io.BytesIO(b"abc"))
    return out.getvalue()


ARCHIVES = [
    packed(tarfile.USTAR_FORMAT),
    packed(tarfile.GNU_FORMAT),
    packed(tarfile.PAX_FORMAT, comment="x", mtime="1.5", path="root/other"),
    packed(tarfile.PAX_FORMAT, **{_OPAQUE: "y"}),
    packed(tarfile.PAX_FORMAT, **{_WHITEOUT: "y"}),
]
# Headers carry a checksum: a change without a new one is mostly the end of the archive.
fields = st.sampled_from(
    [(0, 100), (100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (156, 1), (157, 100), (345, 155)]
)
values = st.one_of(
    st.binary(max_size=12),
    st.sampled_from(
        [b"../x", b"/x", b"root/../../x", b"77777777", b"-1", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"x", b"g"]
    ),
)


@st.composite
def archives(draw: Callable[[Any], Any]) -> bytes:
    data = bytearray(draw(st.sampled_from(ARCHIVES)))
    for _ in range(draw(st.integers(0, 3))):
        at = 512 * draw(st.integers(0, len(data) // 512 - 3))
        start, size = draw(fields)
        data[at + start : at + start + size] = draw(values)[:size].ljust(size, b"\0")
        head = bytes(data[at : at + 148]) + b" " * 8 + bytes(data[at + 156 : at + 512])
        data[at + 148 : at + 156] = b"%06o\0 " % sum(head)
    return edited(bytes(data), draw(edits)) if draw(st.booleans()) else bytes(data)


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def listing(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def put(base: Path, data: bytes) -> None:
    """Unpack into a box whose root is base/root."""
    root = base / "root"
    (root / "home").mkdir(parents=True)
    fd = os.open(root, os.O_PATH)
    files = Files(fd, None, "/home")
    os.close(fd)
    files.put_tar(io.BytesIO(data), "in")


def restore(base: Path, data: bytes) -> None:
    """The reader beneath snapshot_tar.read(), which words what it may raise, into base/layer."""
    at = base / "layer"
    at.mkdir()
    for inner in _NAMES.values():
        (at / inner).mkdir()
    fd = os.open(at, tree.DIRECTORY)
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as archive, tree.Walker(fd, lend=True) as walker:
            reader = _Reader(archive, walker, os.geteuid() == 0)
            for info in archive:
                reader.member(info)
            reader.finish(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_archives_are_read(tmp_path: Path, number: int) -> None:
    put(tmp_path, ARCHIVES[number])
    assert (tmp_path / "root/home/in/root/d/f").read_bytes() == b"abc"
    restore(tmp_path, ARCHIVES[number])
    assert (tmp_path / "layer/u0/d/f").read_bytes() == b"abc"
    assert (tmp_path / "layer/u0/h").samefile(tmp_path / "layer/u0/d/f")


@given(data=archives())
@settings(SLOW, max_examples=150)
def test_an_archive_for_a_box(top: Path, data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=top) as name:
        base = Path(name)
        try:
            put(base, data)
        except (tarfile.TarError, OSError, NsboxError):
            pass
        assert listing(base) == ["root"]
        assert set(listing(base / "root")) <= {"home", "x"}, "beside the target is only what a link inside leads to"
        assert set(listing(base / "root/home")) <= {"in", "x"}


@given(data=archives())
@settings(SLOW, max_examples=150)
def test_an_archive_of_a_snapshot(top: Path, data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=top) as name:
        base = Path(name)
        try:
            restore(base, data)
        except (tarfile.TarError, ValueError, OverflowError, OSError):
            pass
        assert listing(base) == ["layer"]
        assert set(listing(base / "layer")) == set(_NAMES.values())


# ---- what a payload has written, read as a change set ---------------------------------------------------------------

letters = st.one_of(st.sampled_from([b"a", b"..a", b"\xff", b"\n", b"\x1b[2J", b"package.json", b"p.toml", b" ", b"~"]))
entries = st.lists(
    st.tuples(
        st.lists(letters, min_size=1, max_size=3),
        st.sampled_from(["file", "dir", "symlink", "fifo", "whiteout", "socket"]),
        st.binary(max_size=40),
        st.integers(0, 0o7777),
        st.sampled_from(["", "user.overlay.opaque", "user.overlay.whiteout", "user.overlay.redirect", "user.x"]),
    ),
    max_size=8,
)


def make(root: bytes, entry: tuple[list[bytes], str, bytes, int, str]) -> None:
    names, kind, content, mode, attribute = entry
    path = os.path.join(root, *names)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if kind == "dir":
        os.mkdir(path)
    elif kind == "symlink":
        os.symlink(content.replace(b"\0", b"") or b"x", path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "whiteout":
        os.mknod(path, 0o020000, 0)
    elif kind == "socket":
        os.mknod(path, 0o140644)
    else:
        with open(path, "xb") as file:
            file.write(content)
    if kind in ("file", "dir"):
        if attribute:
            os.setxattr(path, attribute, content[:1] or b"y")
        os.chmod(path, mode)


@given(upper=entries, lower=entries)
@settings(SLOW, max_examples=80)
def test_a_change_set(upper: list[Any], lower: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        for folder, found in (("upper", upper), ("lower", lower)):
            (base / folder).mkdir()
            for entry in found:
                try:
                    make(os.fsencode(base / folder), entry)
                except OSError:  # a name that is taken, or beneath what is no directory
                    pass
        fd = os.open(base / "upper", tree.DIRECTORY)
        try:
            result = changes.scan(fd, str(base / "lower"), look_for={"secret": b"ab"})
            for change in result.entries:
                parts = change.path.split("/")
                assert "" not in parts
                assert ".." not in parts
                json.dumps(change.report())
            text = diff.unified(result, fd, str(base / "lower"))
            assert "\x1b" not in text
            transfer.export(result, fd, str(base / "out"))
        finally:
            os.close(fd)
            for directory, folders, _ in os.walk(base):  # for TemporaryDirectory, as an ordinary user
                for folder in folders:
                    if not os.path.islink(os.path.join(directory, folder)):
                        os.chmod(os.path.join(directory, folder), 0o700)
        assert set(listing(base)) <= {"upper", "lower", "out"}


JSON = b'{"scripts": {"build": "make", "test": ["x"]}, "name": "a"}'
TOML = b'[build-system]\nrequires = ["setuptools"]\n[project]\nname = "a"\n'


@given(changed=edits, name=st.sampled_from(["package.json", "pyproject.toml"]), before=st.booleans())
@example(changed=[(0, b"[" * 8, 0)] * 6, name="package.json", before=True)
def test_files_of_which_keys_matter(changed: list[tuple[int, bytes, int]], name: str, before: bool) -> None:
    good = TOML if name.endswith("toml") else JSON
    keys = ("scripts.build", "build-system.requires")
    data = edited(good, changed)
    why = trust.changed_key(name, keys, good if before else None, data)
    assert why or not before or trust._parse(name, data) is not None


@pytest.mark.parametrize("name", ["package.json", "pyproject.toml"])
@pytest.mark.parametrize("unit", [b"[", b'{"a":', b"a = [", b"a.", b"[[", b"a = {a = "])
def test_deep_files_of_which_keys_matter(name: str, unit: bytes) -> None:
    assert trust.changed_key(name, ("a",), None, unit * 100_000)
