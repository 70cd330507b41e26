"""The change set against a model: real overlays, random operations, every difference found and nothing else."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from overlay_driver import NAMES

from nsbox import changes, diff, transfer, tree
from nsbox.change import Change, ChangeSet
from nsbox.copying import stays_inside
from nsbox.trust import changed_key, trust

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = int(os.environ.get("NSBOX_TEST_EXAMPLES", "200"))
Job = Callable[[list[Any], list[Any]], dict[str, Any]]

PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
CONTENTS = st.sampled_from(["", "x", "y", "line\n"])
OPS = st.one_of(
    st.tuples(st.just("write"), PATHS, CONTENTS, st.sampled_from([1, 3, 70000])),
    st.tuples(st.just("append"), PATHS, CONTENTS),
    st.tuples(st.just("rewrite"), PATHS),
    st.tuples(st.just("sparse"), PATHS, st.sampled_from([0, 3, 1 << 20])),
    st.tuples(st.just("mkdir"), PATHS),
    st.tuples(st.just("mkdir"), st.sampled_from(NAMES)),
    st.tuples(st.just("remove"), PATHS),
    st.tuples(st.just("rename"), PATHS, PATHS),
    st.tuples(st.just("symlink"), PATHS, st.sampled_from(["a", "../b", "/nonexistent/x", "a/../../x", "\udcfe"])),
    st.tuples(st.just("link"), PATHS, PATHS),
    st.tuples(st.just("chmod"), PATHS, st.sampled_from([0o600, 0o755, 0o700, 0o4755, 0o1777, 0o666])),
    st.tuples(st.just("fifo"), PATHS),
    st.tuples(st.just("socket"), PATHS),
    st.tuples(st.just("xattr"), PATHS, st.sampled_from(["1", "2"])),
)


def unshare() -> list[str]:
    return ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """job(operations before, operations inside) → what the driver says; one process for all."""
    if subprocess.run([*unshare(), "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be had here")
    top = tmp_path_factory.mktemp("overlay").resolve()
    command = [*unshare(), sys.executable, str(Path(__file__).with_name("overlay_driver.py")), str(top)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        writer, reader = driver.stdin, driver.stdout

        def run(before: list[Any], ops: list[Any]) -> dict[str, Any]:
            document = json.dumps({"before": before, "ops": ops}).encode()
            writer.write(base64.b64encode(document).decode() + "\n")
            writer.flush()
            answer = reader.readline()
            assert answer, "the driver died"
            found: dict[str, Any] = json.loads(answer)
            return found

        yield run
        driver.stdin.close()
        driver.wait(timeout=20)


def expected(lower: dict[str, Any], merged: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """path → (change, kind), from two pictures and nothing else."""
    out = {}
    for path in lower.keys() | merged.keys():
        old, new = lower.get(path), merged.get(path)
        if old is None:
            out[path] = ("added", new[0])
        elif new is None:
            out[path] = ("deleted", old[0])
        elif old[0] != new[0]:
            out[path] = ("type_changed", new[0])
        elif old[2] != new[2] or (old[3] != new[3] and not (new[0] == "dir" and old[1] != new[1])):
            out[path] = ("modified", new[0])
        elif old[1] != new[1]:
            out[path] = ("mode_changed", new[0])
    return out


def check(answer: dict[str, Any]) -> None:
    lower, merged = answer["lower"], answer["merged"]
    wanted = expected(lower, merged)
    found = {entry["path"]: entry for entry in answer["changes"]}
    assert {path: (entry["change"], entry["kind"]) for path, entry in found.items()} == wanted
    assert not answer["truncated"]
    for path, entry in found.items():
        if entry["change"] == "deleted":
            continue
        kind, mode, content, _ = merged[path]
        assert kind == "symlink" or entry["mode"] == mode
        assert entry["sha256"] == (content if kind == "file" else None)
        assert entry["target"] == (content if kind == "symlink" else None)
    check_export(answer, merged, wanted)
    check_apply(answer, lower, merged, wanted)


def crosses(path: str, item: list[Any]) -> bool:
    return item[0] in ("file", "dir") or (item[0] == "symlink" and stays_inside(path, item[2]))


def plain(item: list[Any]) -> list[Any]:
    kind, mode, content, _ = item
    return [kind, mode & 0o775 | (0o700 if kind == "dir" else 0) if kind != "symlink" else 0, content]


def check_export(answer: dict[str, Any], merged: dict[str, Any], wanted: dict[str, tuple[str, str]]) -> None:
    result, found = answer["export"]
    there = {path for path, (change, _) in wanted.items() if change != "deleted" and crosses(path, merged[path])}
    assert set(result["copied"]) == there
    assert {path: item[:3] for path, item in found.items() if path in there} == {p: plain(merged[p]) for p in there}
    parents = {path.rsplit("/", depth)[0] for path in there for depth in range(1, path.count("/") + 1)}
    assert set(found) == there | parents


def check_apply(
    answer: dict[str, Any], lower: dict[str, Any], merged: dict[str, Any], wanted: dict[str, tuple[str, str]]
) -> None:
    result, after = answer["apply"]
    assert not result["conflicts"]
    skipped = {held[0] for held in result["skipped"]}
    assert skipped == {p for p, (change, _) in wanted.items() if change != "deleted" and not crosses(p, merged[p])}
    for path, item in merged.items():
        if path not in skipped:
            same = path not in wanted
            assert after[path][:3] == (lower[path][:3] if same else plain(item)), path
    # What could not cross leaves what was there before, unless that went with a directory.
    assert {path for path in after if path not in merged} == set()


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(
    before=[("mkdir", "a"), ("write", "a/b", "x", 1)], ops=[("remove", "a"), ("mkdir", "a"), ("write", "a/c", "y", 1)]
)
@example(before=[("mkdir", "a"), ("write", "a/b", "x", 1)], ops=[("remove", "a"), ("write", "a", "y", 1)])
@example(before=[("write", "a", "x", 1)], ops=[("remove", "a"), ("mkdir", "a"), ("write", "a/b", "y", 1)])
@example(before=[("write", "a", "x", 1), ("link", "a", "b")], ops=[("append", "a", "y"), ("link", "a", "c")])
@example(before=[("write", "a", "x", 3)], ops=[("rewrite", "a"), ("chmod", "a", 0o600), ("chmod", "a", 0o644)])
@example(
    before=[("mkdir", "a"), ("mkdir", "a/b"), ("write", "a/b/c", "x", 1)], ops=[("remove", "a/b"), ("fifo", "a/b")]
)
@example(before=[("write", "a", "x", 1)], ops=[("remove", "a"), ("symlink", "a", "/nonexistent/x")])
@example(before=[("write", "a", "x", 1), ("link", "a", "c")], ops=[("chmod", "a", 0o600)])
@given(before=st.lists(OPS, max_size=12), ops=st.lists(OPS, max_size=16))
def test_round_trip(job: Job, before: list[Any], ops: list[Any]) -> None:
    check(job(before, ops))


# ---- one thing at a time, on directories that look like an upper one -------------------------------------------------


@pytest.fixture
def upper(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "upper").mkdir()
    (tmp_path / "lower").mkdir()
    fd = os.open(tmp_path / "upper", tree.DIRECTORY)
    yield fd
    os.close(fd)


def scan(upper: int, tmp_path: Path, **options: Any) -> ChangeSet:
    return changes.scan(upper, str(tmp_path / "lower"), **options)


def by_path(found: ChangeSet) -> dict[str, Change]:
    return {entry.path: entry for entry in found.entries}


def test_F14_names_of_any_bytes(upper: int, tmp_path: Path) -> None:
    names = [
        b"\xff\xfe",
        b"a\nb",
        b"\x1b[31mred",
        b"x" * 255,
        "ü".encode(),
        b"\xe2\x80\xaetxt.exe",
        b" ",
        b"-rf",
        b"\\x41",
    ]
    for name in names:
        (tmp_path / "upper" / os.fsdecode(name)).write_bytes(name)
    found = scan(upper, tmp_path)
    assert sorted(os.fsencode(entry.path) for entry in found.entries) == sorted(names)
    assert json.loads(json.dumps([entry.report() for entry in found.entries]))[0]["path"] == found.entries[0].path
    transfer.export(found, upper, str(tmp_path / "out"))
    assert sorted(os.listdir(os.fsencode(tmp_path / "out"))) == sorted(names)
    text = diff.unified(found, upper, str(tmp_path / "lower"))
    assert all(c.isprintable() or c == "\n" for c in text)
    assert text.isascii() or "ü" in text


def test_bounds(upper: int, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"upper/{number:02}").write_bytes(b"x" * 1000)
    few = scan(upper, tmp_path, max_entries=5)
    assert len(few.entries) == 5
    assert few.truncated
    lean = scan(upper, tmp_path, max_bytes=3500)
    assert [bool(entry.sha256) for entry in lean.entries] == [True] * 3 + [False] * 17
    assert lean.truncated
    assert lean.entries[-1].note
    assert not scan(upper, tmp_path, hash=False).entries[0].sha256


def test_a_huge_sparse_file_costs_nothing(upper: int, tmp_path: Path) -> None:
    with open(tmp_path / "upper/huge", "wb") as file:
        file.truncate(1 << 40)
    (entry,) = scan(upper, tmp_path).entries
    assert (entry.bytes, entry.sha256, entry.sparse) == (1 << 40, None, True)
    result = transfer.export(ChangeSet((entry,)), upper, str(tmp_path / "out"))
    assert result.copied == ()
    assert "larger" in result.skipped[0].why


def test_deep_directories_end_somewhere(upper: int, tmp_path: Path) -> None:
    os.makedirs(tmp_path / "upper" / "/".join("d" * 200))
    found = scan(upper, tmp_path)
    assert len(found.entries) == tree.MAX_DEPTH + 1
    assert found.truncated


def test_secrets_across_the_border_of_two_reads(upper: int, tmp_path: Path) -> None:
    secret = b"s3cr3t-value"
    (tmp_path / "upper/leak").write_bytes(b"x" * (tree.CHUNK - 5) + secret + b"y")
    (tmp_path / "upper/clean").write_bytes(b"x" * 100)
    found = by_path(scan(upper, tmp_path, look_for={"token": secret, "other": b"zzzz", "empty": b""}))
    assert found["leak"].secrets == ("token",)
    assert found["clean"].secrets == ()
    assert found["leak"].report()["secrets"] == ["token"]


def test_ids_are_mapped(upper: int, tmp_path: Path) -> None:
    (tmp_path / "upper/a").write_text("x")
    (entry,) = scan(upper, tmp_path, map_ids=lambda host: host - os.getuid() + 7).entries
    assert entry.uid == 7


@pytest.mark.root
def test_whiteouts_of_an_unknown_lower(upper: int, tmp_path: Path) -> None:
    os.mknod(tmp_path / "upper/gone", 0o000 | 0o020000, os.makedev(0, 0))
    os.mknod(tmp_path / "upper/device", 0o600 | 0o020000, os.makedev(1, 3))
    found = by_path(changes.scan(upper, None))
    assert (found["gone"].change, found["gone"].kind) == ("deleted", "unknown")
    assert (found["device"].change, found["device"].kind) == ("added", "char")
    assert set(by_path(scan(upper, tmp_path))) == {"device"}


def test_whiteouts_by_attribute(upper: int, tmp_path: Path) -> None:
    (tmp_path / "lower/dir").mkdir()
    (tmp_path / "upper/dir").mkdir()
    for name in ("gone", "kept"):
        (tmp_path / "lower/dir" / name).write_text("x")
        (tmp_path / "upper/dir" / name).write_text("")
    try:
        os.setxattr(tmp_path / "upper/dir", "user.overlay.opaque", b"x")
        os.setxattr(tmp_path / "upper/dir/gone", "user.overlay.whiteout", b"y")
    except OSError:
        pytest.skip("the file system has no such attributes")
    found = by_path(scan(upper, tmp_path))
    assert {path: entry.change for path, entry in found.items()} == {"dir/gone": "deleted", "dir/kept": "modified"}


@pytest.mark.user
def test_what_was_made_unreadable_is_read(upper: int, tmp_path: Path) -> None:
    inner = tmp_path / "upper/closed"
    inner.mkdir()
    (inner / "file").write_text("x")
    (inner / "file").chmod(0)
    inner.chmod(0)
    found = by_path(scan(upper, tmp_path))
    assert found["closed"].mode == 0
    assert found["closed/file"].sha256
    assert inner.stat().st_mode & 0o777 == 0


# ---- what the host would trust ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, kind, marked",
    [
        *(
            (path, "file", True)
            for path in (
                ".git/hooks/pre-commit",
                ".git/config",
                "vendor/x/.git/hooks/post-merge",
                ".GIT/config",
                ".git",
                ".gitmodules",
                ".envrc",
                "a/.envrc",
                ".bashrc",
                ".vscode/tasks.json",
                ".idea/workspace.xml",
                ".github/workflows/ci.yml",
                ".gitlab-ci.yml",
                "tests/conftest.py",
                "venv/lib/x.pth",
                ".husky/pre-push",
                ".cargo/config.toml",
                "build.rs",
                "setup.py",
                "AGENTS.md",
                "woodpecker/.woodpecker.yaml",
            )
        ),
        (".vscode", "symlink", True),
        (".git/hooks", "symlink", True),
        *((path, "dir", False) for path in (".vscode", ".github")),
        *(
            (path, "file", False)
            for path in (
                "src/main.py",
                "Makefile",
                "git/config",
                "x.gitmodules",
                "docs/setup.python",
                "github/workflows/a.yml",
            )
        ),
    ],
)
def test_F12_marks(path: str, kind: str, marked: bool) -> None:
    assert bool(trust().why(path, kind)) == marked


@pytest.mark.parametrize(
    "name, before, after, marked",
    [
        ("package.json", b'{"scripts": {"test": "x"}}', b'{"scripts": {"test": "x"}, "version": "2"}', False),
        ("package.json", b'{"scripts": {"test": "x"}}', b'{"scripts": {"test": "y"}}', True),
        ("package.json", None, b'{"name": "a"}', False),
        ("package.json", None, b'{"scripts": {"postinstall": "y"}}', True),
        ("package.json", None, b"{", True),
        ("package.json", None, b"[" * 100_000, True),
        ("package.json", None, b"[]", True),
        ("pyproject.toml", b"[project]\nname='a'", b"[project]\nname='b'", False),
        ("pyproject.toml", b"", b"[build-system]\nbackend-path=['.']", True),
        ("pyproject.toml", b"", b"[tool.pytest.ini_options]\naddopts='-p x'", True),
        ("pyproject.toml", b"", b"\xff", True),
    ],
)
def test_F12_files_of_which_some_keys_matter(
    upper: int, tmp_path: Path, name: str, before: bytes | None, after: bytes, marked: bool
) -> None:
    assert bool(changed_key(name, trust().keys_of(name), before, after)) == marked
    (tmp_path / "upper" / name).write_bytes(after)
    if before is not None:
        (tmp_path / "lower" / name).write_bytes(before)
    (entry,) = scan(upper, tmp_path).entries
    assert bool(entry.trusted_by_host) == marked
    assert entry.report()["trusted_by_host"] is marked
