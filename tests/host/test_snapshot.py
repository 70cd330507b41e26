"""Going back to an earlier state, and starting others from it: what is written, deleted, replaced; owners and modes."""

import gc
import io
import os
import resource
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import nsbox
from nsbox import probe
from nsbox.box import Sandbox
from nsbox.errors import HostError, SandboxUnavailable, SpecError
from nsbox.layers import Copier
from nsbox.resources.sweep import sweep
from nsbox.snapshot import MAX_LAYERS, Snapshot

LIST = "find . ! -name . -printf '%P %y %m %U %n %l\\n' | sort; find . -type f | sort | xargs -r cat 2>&1"


@pytest.fixture(autouse=True)
def nothing_held() -> Iterator[None]:
    """An error that a test caught holds its frame, and with it the snapshots there, until they are collected."""
    yield
    gc.collect()


@pytest.fixture(autouse=True, scope="module")
def to_be_had(helper_process: None) -> None:
    if os.geteuid() == 0 and not probe.host().idmap:
        with Sandbox() as box, pytest.raises(HostError, match="takes no idmapped mounts"):
            box.snapshot()
        pytest.skip("there are no snapshots where the state directory takes no idmapped mounts (tmpfs: Linux 6.3)")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "kept").write_text("kept\n")
    (tmp_path / "dir/sub").mkdir(parents=True)
    (tmp_path / "dir/file").write_text("file\n")
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.fixture
def box(workspace: Path) -> Iterator[Sandbox]:
    with Sandbox(workspace=str(workspace), timeout=30) as made:
        yield made


def state(box: Sandbox) -> str:
    return box.run(LIST).stdout_text + box.run(LIST, cwd="/home/user").stdout_text


CHANGES = """
rm -r dir; mkdir dir; echo new > dir/new
rm kept; mkdir kept; echo 1 > kept/1
echo a > a; ln a hard; ln -s a soft; chmod 640 a; mkfifo fifo
mkdir closed; echo x > closed/x; chmod 000 closed/x closed
printf 'x%.0s' $(seq 5000) > long; truncate -s 100M sparse
echo home > ~/home; mkdir -p ~/.cache/deep; echo tmp > /tmp/tmp
"""


def test_what_was_written_deleted_and_replaced_comes_back(box: Sandbox) -> None:
    box.run(CHANGES).check()
    before = state(box)
    snapshot = box.snapshot()
    assert state(box) == before
    box.run("chmod 755 closed; rm -rf ./* ~/* ~/.cache; echo other > other").check()
    box.restore(snapshot)
    assert state(box) == before
    assert box.run(["cat", "/tmp/tmp"]).stdout == b"tmp\n"
    assert box.run(["stat", "-c", "%b", "sparse"]).stdout == b"0\n"
    box.run("echo more >> a; rm dir/new; rmdir dir; echo again > again").check()
    assert box.run("cat a again; test -e dir").stdout == b"a\nmore\nagain\n"
    box.restore(snapshot)
    assert state(box) == before


def test_changes_are_those_against_the_workspace(box: Sandbox, workspace: Path, tmp_path: Path) -> None:
    box.run("rm dir/file; echo 1 > one").check()
    first = box.snapshot()
    box.restore(first)
    box.run("echo 2 > two; echo 1+ >> one").check()
    found = {entry.path: entry.change for entry in box.changes().entries}
    assert found == {"dir/file": "deleted", "one": "added", "two": "added"}
    assert {entry.uid for entry in box.changes().entries if entry.change == "added"} == {1000}
    out = tmp_path.parent / (tmp_path.name + "-out")
    box.export(str(out))
    assert (out / "one").read_text() == "1\n1+\n"
    box.apply()
    assert (workspace / "two").read_text() == "2\n"
    assert not (workspace / "dir/file").exists()


def test_what_ran_ends_with_a_restore(box: Sandbox) -> None:
    snapshot = box.snapshot()
    process = box.popen(["sleep", "71"])
    box.run("sleep 72 >/dev/null 2>&1 &", background=True)
    box.restore(snapshot)
    with pytest.raises(SandboxUnavailable):
        process.wait()
    assert box.run("ps -eo args= | grep '[s]leep 7'").stdout == b""
    assert box.is_running


def test_a_snapshot_while_commands_run(box: Sandbox) -> None:
    process = box.popen("i=0; while :; do echo $i >> log; i=$((i+1)); done", timeout=20)
    time.sleep(0.1)
    snapshot = box.snapshot()
    time.sleep(0.05)
    assert process.poll() is None
    process.kill()
    process.wait()
    later = int(box.run(["tail", "-n", "1", "log"]).stdout)
    box.restore(snapshot)
    lines = box.read_file("log").decode().split()
    assert lines == [str(number) for number in range(len(lines))]
    assert 0 < len(lines) <= later


def test_pause_and_resume(box: Sandbox) -> None:
    box.run("(while :; do echo >> /tmp/now; done) >/dev/null 2>&1 &", background=True)
    time.sleep(0.2)
    box.pause()
    first = box.read_file("/tmp/now")
    time.sleep(0.1)
    assert box.read_file("/tmp/now") == first
    box.pause()
    box.resume()
    time.sleep(0.3)
    assert box.read_file("/tmp/now") != first
    assert box.run(["true"]).ok


def test_fifty_forks_share_what_is_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    layer = Copier.layer

    def counted(self: Copier, source: int, *args: Any) -> None:
        copied.append(source)
        layer(self, source, *args)

    monkeypatch.setattr(Copier, "layer", counted)
    with open(tmp_path / "large", "wb") as file:
        file.truncate(200 << 20)
    tmp_path.chmod(0o755)
    with Sandbox(workspace=str(tmp_path), timeout=30) as box:
        box.run("echo shared > shared").check()
        box.snapshot()
        once = len(copied)
        forks = box.fork(50)
        try:
            # One for all of them, of what the box has written; what lies below that is copied by nobody.
            assert 0 < len(copied) == 2 * once
            assert len({fork._layers for fork in forks}) == 1
            for number in (0, 17, 49):
                forks[number].run(f"echo {number} >> shared").check()
            assert forks[17].read_file("shared") == b"shared\n17\n"
            assert forks[1].read_file("shared") == b"shared\n"
            assert forks[1].files.stat("large").size == 200 << 20
            assert box.read_file("shared") == b"shared\n"
        finally:
            for fork in forks:
                fork.close()


def test_another_box_from_a_snapshot(box: Sandbox) -> None:
    box.run("echo x > x; echo y > ~/y").check()
    snapshot = box.snapshot()
    box.close()
    with Sandbox.from_snapshot(snapshot, hostname="other") as other:
        assert other.run("hostname; cat x ~/y").stdout == b"other\nx\ny\n"
    with pytest.raises(SandboxUnavailable):
        box.snapshot()
    with pytest.raises(SandboxUnavailable):
        box.restore(snapshot)


def test_many_layers_are_made_one(box: Sandbox) -> None:
    for number in range(MAX_LAYERS + 3):
        box.run(
            f"rm -f n{number - 1}; echo {number} > n{number}; rm -rf d; mkdir d; echo {number} > d/n{number}"
        ).check()
        snapshot = box.snapshot()
        box.restore(snapshot)
    assert len(snapshot.layers) < MAX_LAYERS
    last = MAX_LAYERS + 2
    assert box.run("ls . d").stdout_text.split() == [".:", "d", "dir", "kept", f"n{last}", "d:", f"n{last}"]


def test_layers_go_with_the_last_who_uses_them() -> None:
    path = Path(probe.host().state)

    def layers() -> int:
        return len(list(path.glob("nsbox-*")))

    before = layers()
    with Sandbox() as box:
        snapshot: Snapshot | None = box.snapshot()
        assert snapshot is not None
        fork = Sandbox.from_snapshot(snapshot)
        assert layers() == before + 1
        snapshot = None
        assert layers() == before + 1
        fork.close()
        del fork
        deadline = time.monotonic() + 3
        while layers() > before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert layers() == before


def test_what_a_killed_process_leaves_is_collected() -> None:
    code = (
        "import nsbox, os, signal\n"
        "box = nsbox.Sandbox(); box.run('echo x > x'); snapshot = box.snapshot()\n"
        "print(snapshot.layers[0].path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, env={**os.environ, "PYTHONPATH": root}
    )
    path = Path(done.stdout.decode().strip())
    assert path.is_dir()
    sweep(probe.host().state)
    assert not path.exists()


def test_as_a_tar_archive_and_back(box: Sandbox) -> None:
    box.run(CHANGES + "rm sparse").check()
    before = state(box)
    stream = io.BytesIO()
    box.restore(box.snapshot())
    box.run("rm long").check()
    expected = state(box)
    assert before != expected
    box.snapshot().export_tar(stream)
    stream.seek(0)
    snapshot = Snapshot.import_tar(stream, box.spec)
    with Sandbox.from_snapshot(snapshot) as other:
        assert state(other) == expected


@pytest.mark.parametrize(
    "members",
    [
        [("../evil", tarfile.REGTYPE, "")],
        [("root/../../evil", tarfile.REGTYPE, "")],
        [("/root/evil", tarfile.REGTYPE, "")],
        [("evil", tarfile.REGTYPE, "")],
        [("root/link", tarfile.SYMTYPE, "/tmp"), ("root/link/evil", tarfile.REGTYPE, "")],
        [("root/dev", tarfile.CHRTYPE, "")],
        [("root/hard", tarfile.LNKTYPE, "../../etc/passwd")],
        [("root/soft", tarfile.SYMTYPE, "/etc/passwd"), ("root/hard", tarfile.LNKTYPE, "root/soft")],
        [("root/twice", tarfile.REGTYPE, ""), ("root/twice", tarfile.REGTYPE, "")],
    ],
)
def test_a_hostile_archive(members: list[tuple[str, bytes, str]]) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            tar.addfile(info)
    stream.seek(0)
    with pytest.raises(SpecError, match="archive"):
        Snapshot.import_tar(stream, nsbox.Spec())
    assert not Path("/tmp/evil").exists()
    with pytest.raises(SpecError):
        Snapshot.import_tar(io.BytesIO(b"no tar" * 1000), nsbox.Spec())


def test_set_id_bits_do_not_lie_on_the_host() -> None:
    with Sandbox(uid=0) as box:
        box.run("cp /bin/true ~/suid; chmod 6755 ~/suid")
        snapshot = box.snapshot()
        for folder, _, files in os.walk(snapshot.layers[0].path):
            for name in files:
                assert not os.lstat(os.path.join(folder, name)).st_mode & 0o6000


names = st.sampled_from(["a", "b", "dir/a", "dir/b", "dir/sub/a", "kept"])


class Model(RuleBasedStateMachine):
    """A box and a dictionary of its files go through the same changes, snapshots and restores."""

    box: Sandbox

    def __init__(self) -> None:
        super().__init__()
        self.files = {"kept": b"kept", "dir/file": b"file"}
        self.snapshots: list[tuple[Snapshot, dict[str, bytes]]] = []

    @initialize()
    def start(self) -> None:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        for name, data in self.files.items():
            path = Path(self.folder.name, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        os.chmod(self.folder.name, 0o755)
        self.box = Sandbox(workspace=self.folder.name)

    def teardown(self) -> None:
        if hasattr(self, "box"):
            self.check()
            self.box.close()
            self.folder.cleanup()
        self.snapshots.clear()

    def check(self) -> None:
        found = {item.name: self.box.read_file(item.name) for item in self.box.files.walk() if item.kind == "file"}
        assert found == self.files

    @rule(name=names, data=st.binary(max_size=5))
    def write(self, name: str, data: bytes) -> None:
        parents = {name.rsplit("/", number)[0] for number in range(1, name.count("/") + 1)}
        if not parents & self.files.keys() and not any(other.startswith(name + "/") for other in self.files):
            try:
                self.box.write_file(name, data)
            except IsADirectoryError:  # an empty one
                return
            self.files[name] = data

    @rule(name=st.sampled_from(["a", "dir", "dir/sub", "dir/a", "kept"]))
    def remove(self, name: str) -> None:
        if self.box.files.exists(name):
            self.box.files.remove(name, recursive=True)
        self.files = {k: v for k, v in self.files.items() if k != name and not k.startswith(name + "/")}

    @rule()
    def take(self) -> None:
        self.snapshots.append((self.box.snapshot(), dict(self.files)))

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, 100))
    def go_back(self, which: int) -> None:
        snapshot, files = self.snapshots[which % len(self.snapshots)]
        self.box.restore(snapshot)
        self.files = dict(files)
        self.check()

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, 100))
    def change_over(self, which: int) -> None:
        snapshot, files = self.snapshots[which % len(self.snapshots)]
        self.box.close()
        self.box = Sandbox.from_snapshot(snapshot)
        self.files = dict(files)
        self.check()


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_many_files_of_many_names_need_no_descriptors(box: Sandbox) -> None:
    """One for each would be more than most processes may have. Names lie in directories that nobody may enter, too."""
    box.run("""
        mkdir -p a/b c closed; n=0
        while [ $n -lt 400 ]; do echo $n > a/b/$n; ln a/b/$n c/$n; ln a/b/$n closed/$n; n=$((n+1)); done
        chmod 000 closed; chmod 500 a/b
    """).check()
    links = """
        chmod 700 closed
        find a c closed -type f -printf '%i %n\\n' | sort | uniq -c | awk '{print $1, $3}' | sort | uniq -c
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 100, limit[1]))
    try:
        snapshot = box.snapshot()
        box.run("rm -r a c; chmod 700 closed; rm -r closed").check()
        box.restore(snapshot)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert box.run("stat -c %a closed a/b").stdout == b"0\n500\n"
    assert box.run(links).stdout_text.split() == ["400", "3", "3"], "400 files, each of three names, each seen thrice"
    assert box.run("cat c/7 closed/7; cat a/b/399").stdout == b"7\n7\n399\n"
