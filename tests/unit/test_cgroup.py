"""Where groups go and what is written to them, on a made-up cgroup file system."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nsbox.errors import HostError
from nsbox.resources import cgroup_fs as fs
from nsbox.resources import cgroup_nest
from nsbox.resources import cgroup_v2 as v2
from nsbox.resources.cgroup import COUNTERS, Hierarchy, IoMax, Wanted
from nsbox.resources.cgroup_find import look, sweep_places

ME = str(os.getpid())
V2_FILES = {
    "": {"cgroup.procs": "", "cgroup.kill": "", "cgroup.freeze": "0\n", "cgroup.events": "populated 0\nfrozen 0\n"},
    "memory": {
        "memory.max": "max\n",
        "memory.swap.max": "max\n",
        "memory.oom.group": "0\n",
        "memory.peak": "4096\n",
        "memory.events": "low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\noom_group_kill 1\n",
    },
    "pids": {"pids.max": "max\n", "pids.peak": "3\n", "pids.events": "max 5\n"},
    "cpu": {"cpu.max": "max 100000\n"},
    "io": {"io.max": "", "io.stat": "8:0 rbytes=10 wbytes=20 rios=1 wios=1\n8:16 rbytes=1 wbytes=2 rios=1 wios=1\n"},
}
PRESSURE = "some avg10=0.00 avg60=0.00 avg300=0.00 total=1234\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
CPU_STAT = "usage_usec 300\nuser_usec 100\nsystem_usec 200\nnr_periods 9\nnr_throttled 4\nthrottled_usec 50\n"
V1_FILES = {
    "memory": {
        "memory.limit_in_bytes": "9223372036854771712\n",
        "memory.memsw.limit_in_bytes": "9223372036854771712\n",
        "memory.max_usage_in_bytes": "8192\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    },
    "pids": {"pids.max": "max\n", "pids.events": "max 6\n"},
    "cpu": {"cpu.cfs_quota_us": "-1\n", "cpu.stat": "nr_periods 1\nnr_throttled 2\nthrottled_time 3000\n"},
    "cpuacct": {"cpuacct.usage": "5000\n", "cpuacct.stat": "user 1\nsystem 2\n"},
    "freezer": {"freezer.state": "THAWED\n"},
    "blkio": {
        "blkio.throttle.read_bps_device": "",
        "blkio.throttle.write_bps_device": "",
        "blkio.throttle.io_service_bytes_recursive": "8:0 Read 5\n8:0 Write 6\n8:0 Total 11\nTotal 11\n",
    },
}


class Kernel:
    """As much of cgroups(7) as matters here, over plain files in a temporary directory."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = top
        self.mountinfo = "23 1 0:2 / / rw - ext4 /dev/root rw\n"
        self.own = ""
        self.read_only: set[str] = set()
        self.writes: list[tuple[str, str]] = []
        self._mkdir, self._rmdir, self._read = os.mkdir, os.rmdir, fs.read_text
        monkeypatch.setattr(os, "mkdir", self.mkdir)
        monkeypatch.setattr(os, "rmdir", self.rmdir)
        monkeypatch.setattr(fs, "read_text", self.read)
        monkeypatch.setattr(fs, "write_at", self.write)
        monkeypatch.setattr(fs, "writable", lambda path: os.path.exists(path) and not self.closed(path))
        monkeypatch.setattr("nsbox.resources.cgroup_find.own_pids", lambda: frozenset([int(ME)]))
        monkeypatch.setattr("nsbox.resources.cgroup.own_pids", lambda: frozenset([int(ME)]))

    def closed(self, path: str) -> bool:
        path = os.path.normpath(path)
        return path in self.read_only or (os.path.dirname(path) in self.read_only and os.path.isfile(path))

    def mount_v1(self, controllers: str, root: str = "/", own: str = "/") -> str:
        point = str(self.top / controllers)
        self._mkdir(point)
        Path(point, "cgroup.procs").write_text("1\n")
        self.mountinfo += f"40 23 0:9 {root} {point} rw,relatime shared:9 - cgroup cgroup rw,{controllers}\n"
        self.own += f"5:{controllers}:{own}\n"
        return point

    def mount_v2(self, controllers: str, own: str = "/", root: str = "/", real: bool = True, shared: str = "") -> str:
        point = str(self.top / "v2")
        self._mkdir(point)
        self.mountinfo += f"50 23 0:8 {root} {point} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
        self.own += f"0::{own}\n"
        self._fill_v2(point, controllers)
        if real:
            Path(point, "cgroup.type").unlink()
            Path(point, "cgroup.subtree_control").write_text(f"{shared}\n")
        Path(point, "cgroup.procs").write_text("1\n")
        return point

    def group(self, path: str, *, processes: str = "", shared: str = "") -> str:
        """A group below a v2 mount; ``shared`` are its controllers for children."""
        os.mkdir(path)
        Path(path, "cgroup.procs").write_text("".join(pid + "\n" for pid in processes.split()))
        Path(path, "cgroup.subtree_control").write_text(shared + "\n")
        return path

    def _fill_v2(self, path: str, controllers: str) -> None:
        files = {name: text for key in ("", *controllers.split()) for name, text in V2_FILES.get(key, {}).items()}
        files |= {"cgroup.type": "domain\n", "cgroup.controllers": controllers + "\n", "cgroup.subtree_control": "\n"}
        files |= {f"{name}.pressure": PRESSURE for name in ("cpu", "io", "memory")} | {"cpu.stat": CPU_STAT}
        for name, text in files.items():
            Path(path, name).write_text(text)

    def _path(self, name: str | os.PathLike[str], directory: int | None) -> str:
        return os.path.join(
            os.readlink(f"/proc/self/fd/{directory}") if directory is not None else "/", os.fspath(name)
        )

    def mkdir(self, name: str | os.PathLike[str], mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        path = self._path(name, dir_fd)
        self._mkdir(path, mode)
        if not path.startswith(f"{self.top}/"):
            return
        if path.startswith(f"{self.top}/v2/"):
            self._fill_v2(path, Path(path, "../cgroup.subtree_control").resolve().read_text().strip())
            return
        for controller in path.removeprefix(f"{self.top}/").split("/")[0].split(","):
            for file, text in ({"tasks": "", "cgroup.procs": ""} | V1_FILES.get(controller, {})).items():
                Path(path, file).write_text(text)

    def rmdir(self, name: str | os.PathLike[str], *, dir_fd: int | None = None) -> None:
        path = self._path(name, dir_fd)
        if path.startswith(f"{self.top}/"):
            if any(entry.is_dir() for entry in os.scandir(path)) or Path(path, "cgroup.procs").read_text().strip():
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
            for entry in os.scandir(path):
                os.unlink(entry.path)
        self._rmdir(path)

    def read(self, path: str) -> str:
        return {"/proc/self/mountinfo": self.mountinfo, "/proc/self/cgroup": self.own}.get(path) or self._read(path)

    def write(self, directory: int | None, name: str, text: str) -> None:
        path = self._path(name, directory)
        file = Path(path)
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self.writes.append((path.removeprefix(f"{self.top}/"), text))
        if file.name == "cgroup.subtree_control":
            if text[1:] not in Path(file.parent, "cgroup.controllers").read_text().split():
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if Path(file.parent, "cgroup.type").exists() and Path(file.parent, "cgroup.procs").read_text().strip():
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
            text = " ".join(sorted({*file.read_text().split(), text[1:]}))
        if file.name == "cgroup.procs":
            for other in Path(self.top).rglob("cgroup.procs"):
                other.write_text("".join(f"{pid}\n" for pid in other.read_text().split() if pid != text))
            text = file.read_text() + text
        file.write_text(text + "\n")

    def value(self, path: str) -> str:
        return (self.top / path).read_text().strip()


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    top = tmp_path / "cgroup"
    top.mkdir()
    return Kernel(top, monkeypatch)


@pytest.fixture
def state(tmp_path: Path) -> str:
    path = tmp_path / "state"
    path.mkdir()
    return str(path)


def test_v2_at_the_real_root(kernel: Kernel, state: str) -> None:
    point = kernel.mount_v2("cpu io memory pids cpuset", own="/system.slice/busy.service")
    hierarchy = Hierarchy(state, look())
    assert hierarchy.strength("memory") == (True, f"cgroup v2 memory at {point}/nsbox", "")
    made = hierarchy.make(Wanted(64 << 20, 32, 0.5, (IoMax("8:0", 1000, None, None, 7),)), "x")
    assert made.join == ()
    assert made.into >= 0
    (path,) = made.paths
    owner = f"{ME}-{cgroup_nest.start_time('self')}"
    assert path.startswith(f"{point}/nsbox/{owner}/")
    inner = path.removeprefix(f"{kernel.top}/")
    expected = {
        "memory.max": str(64 << 20),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "32",
        "cpu.max": "50000 100000",
        "io.max": "8:0 rbps=1000 wbps=max riops=max wiops=7",
    }
    assert {name: kernel.value(f"{inner}/{name}") for name in expected} == expected
    for above in ("v2", "v2/nsbox", f"v2/nsbox/{owner}"):
        assert kernel.value(f"{above}/cgroup.subtree_control") == "cpu io memory pids"
    assert kernel.value("v2/cgroup.procs") == "1"
    assert made.release()
    hierarchy.close()
    assert not os.path.exists(f"{point}/nsbox")


def test_v2_counters(kernel: Kernel, state: str) -> None:
    kernel.mount_v2("cpu io memory pids")
    hierarchy = Hierarchy(state, look())
    made = hierarchy.make(Wanted(1 << 20, 2, 1.0), "x")
    assert made.counters() == {
        "memory_peak_bytes": 4096,
        "oom_kills": 2,
        "pids_peak": 3,
        "pids_events": 5,
        "cpu_usage_us": 300,
        "cpu_user_us": 100,
        "cpu_system_us": 200,
        "cpu_throttled_count": 4,
        "cpu_throttled_us": 50,
        "io_read_bytes": 11,
        "io_write_bytes": 22,
        "pressure_cpu_us": 1234,
        "pressure_io_us": 1234,
        "pressure_memory_us": 1234,
    }
    assert made.cpu_usage_us() == 300
    made.set(Wanted(None, None, None))
    (path,) = (path.removeprefix(f"{kernel.top}/") for path in made.paths)
    assert [kernel.value(f"{path}/{name}") for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")] == [
        *("max", "max", "max", "max 100000")
    ]
    assert made.kill()
    assert kernel.value(f"{path}/cgroup.kill") == "1"
    made.release()
    hierarchy.close()


def test_v2_without_newer_files(kernel: Kernel, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(V2_FILES, "memory", {"memory.max": "max\n", "memory.events": "max 0\n"})
    monkeypatch.setitem(V2_FILES, "pids", {"pids.max": "max\n"})
    kernel.mount_v2("memory pids")
    hierarchy = Hierarchy(state, look())
    made = hierarchy.make(Wanted(1 << 20, 2, None), "x")
    counters = made.counters()
    assert counters.keys() == {*COUNTERS}
    assert [counters[name] for name in ("memory_peak_bytes", "oom_kills", "pids_peak", "pids_events")] == [None] * 4
    made.release()
    hierarchy.close()


def test_v2_alone_in_a_delegated_group(kernel: Kernel, state: str) -> None:
    point = kernel.mount_v2("cpu memory pids", own="/user.slice/scope", shared="cpu memory pids")
    kernel.read_only = {point, f"{point}/user.slice"}
    kernel.group(f"{point}/user.slice", shared="cpu memory pids")
    kernel.group(f"{point}/user.slice/scope", processes=ME)
    found = look()
    assert found.v2
    assert found.v2.move
    assert kernel.writes == []  # looking changes nothing
    hierarchy = Hierarchy(state, found)
    made = hierarchy.make(Wanted(1 << 20, 5, 1.0), "x")
    assert made.paths[0].startswith(f"{point}/user.slice/scope/nsbox/")
    assert kernel.value("v2/user.slice/scope/cgroup.procs") == ""
    assert kernel.value("v2/user.slice/scope/nsbox-self/cgroup.procs") == ME
    assert kernel.value("v2/user.slice/scope/cgroup.subtree_control") == "cpu memory pids"
    made.release()
    hierarchy.close()
    kernel.own = "0::/user.slice/scope/nsbox-self\n"  # where it is now, and a process that it starts
    assert look().v2 == v2.Place(f"{point}/user.slice/scope", frozenset(("cpu", "memory", "pids")), False)


def test_v2_never_moves_others(kernel: Kernel, state: str) -> None:
    point = kernel.mount_v2("cpu memory pids", own="/slice/scope", shared="cpu memory pids")
    kernel.read_only = {point, f"{point}/slice"}
    kernel.group(f"{point}/slice", shared="cpu memory pids")
    kernel.group(f"{point}/slice/scope", processes=f"{ME} 1")
    hierarchy = Hierarchy(state, look())
    for limit in ("memory", "pids", "cpu"):
        available, reason, remedy = hierarchy.strength(limit)
        assert not available
        assert f"{point}/slice/scope has other processes in it (such as 1" in reason
        assert remedy
    with pytest.raises(HostError, match=r"the memory limit cannot be enforced: cgroup v2: .*/slice/scope has other"):
        hierarchy.make(Wanted(1 << 20, None, None), "x")
    assert kernel.writes == []


def test_v2_above_a_crowded_group(kernel: Kernel, state: str) -> None:
    point = kernel.mount_v2("memory pids", own="/slice/scope", shared="memory pids")
    kernel.read_only = {point}
    kernel.group(f"{point}/slice", shared="memory pids")
    scope = kernel.group(f"{point}/slice/scope", processes=f"{ME} 1")
    hierarchy = Hierarchy(state, look())
    assert hierarchy.strength("memory") == (True, f"cgroup v2 memory at {point}/slice/nsbox", "")
    assert not hierarchy.strength("cpu")[0]
    Path(scope, "memory.max").write_text("1048576\n")
    available, reason, _ = Hierarchy(state, look()).strength("memory")
    assert not available
    assert f"going above {scope} would evade its memory.max" in reason


def test_v2_root_of_a_container(kernel: Kernel, state: str) -> None:
    point = kernel.mount_v2("memory pids", real=False)  # with process 1 in it
    available, reason, remedy = Hierarchy(state, look()).strength("memory")
    assert not available
    assert f"{point} has other processes" in reason
    if os.geteuid() == 0:
        assert f"mkdir {point}/init" in remedy
    Path(point, "cgroup.procs").write_text(ME + "\n")
    hierarchy = Hierarchy(state, look())
    made = hierarchy.make(Wanted(1 << 20, None, None), "x")
    assert kernel.value("v2/nsbox-self/cgroup.procs") == ME
    made.release()
    hierarchy.close()


def test_v2_crowded_meanwhile(kernel: Kernel, state: str) -> None:
    point = kernel.mount_v2("memory pids", real=False)
    Path(point, "cgroup.procs").write_text(ME + "\n")
    hierarchy = Hierarchy(state, look())
    Path(point, "cgroup.procs").write_text(f"{ME}\n1\n")
    with pytest.raises(HostError, match=r"cannot write '\+memory' to .*/cgroup.subtree_control: .*; move "):
        hierarchy.make(Wanted(1 << 20, None, None), "x")
    hierarchy.close()


def test_v1(kernel: Kernel, state: str) -> None:
    for name in ("cpu,cpuacct", "memory", "pids", "freezer", "blkio", "devices"):
        kernel.mount_v1(name, own="/busy")
    hierarchy = Hierarchy(state, look())
    assert hierarchy.strength("io") == (True, f"cgroup v1 blkio at {kernel.top}/blkio/nsbox", "")
    made = hierarchy.make(Wanted(64 << 20, 32, 1.5), "x")
    assert made.into == -1
    assert len(made.join) == len(made.paths) == 4
    os.write(made.join[0], b"0")
    paths = {path.removeprefix(f"{kernel.top}/").split("/")[0]: path for path in made.paths}
    assert paths.keys() == {"cpu,cpuacct", "memory", "pids", "freezer"}
    read = {
        ("memory", "memory.limit_in_bytes"): str(64 << 20),
        ("memory", "memory.memsw.limit_in_bytes"): str((64 << 20) + os.sysconf("SC_PAGE_SIZE")),
        ("pids", "pids.max"): "32",
        ("cpu,cpuacct", "cpu.cfs_quota_us"): "150000",
    }
    assert {key: Path(paths[key[0]], key[1]).read_text().strip() for key in read} == read
    expected: dict[str, int | None] = dict.fromkeys(COUNTERS)
    expected |= {
        "memory_peak_bytes": 8192,
        "oom_kills": 1,
        "pids_events": 6,
        "cpu_usage_us": 5,
        "cpu_user_us": 1_000_000 // os.sysconf("SC_CLK_TCK"),
        "cpu_system_us": 2_000_000 // os.sysconf("SC_CLK_TCK"),
        "cpu_throttled_count": 2,
        "cpu_throttled_us": 3,
    }
    assert made.counters() == expected
    assert made.freeze()
    assert Path(paths["freezer"], "freezer.state").read_text().strip() == "FROZEN"
    assert made.thaw()
    with pytest.raises(HostError, match="the io limit cannot be added"):
        made.set(Wanted(None, None, None, (IoMax("8:0", 1),)))
    made.release()
    made = hierarchy.make(Wanted(None, None, None, (IoMax("8:0", 1000, 2000),)), "x")
    (path,) = (path for path in made.paths if "/blkio/" in path)
    assert Path(path, "blkio.throttle.write_bps_device").read_text().strip() == "8:0 2000"
    assert made.counters()["io_write_bytes"] == 6
    made.release()
    hierarchy.close()
    assert not any(Path(kernel.top).rglob("nsbox*"))


def test_v1_where_only_the_own_group_can_be_written(kernel: Kernel, state: str) -> None:
    point = kernel.mount_v1("memory", own="/mine")
    kernel.read_only = {point}
    os.mkdir(f"{point}/mine")
    hierarchy = Hierarchy(state, look())
    assert hierarchy.strength("memory") == (True, f"cgroup v1 memory at {point}/mine/nsbox", "")
    kernel.read_only = {point, f"{point}/mine"}
    available, reason, remedy = Hierarchy(state, look()).strength("memory")
    assert not available
    assert reason == f"cgroup v1: {point} and {point}/mine cannot be written"
    assert remedy


def test_v1_without_swap_accounting(kernel: Kernel, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**V1_FILES["memory"], "memory.swappiness": "60\n"}
    del files["memory.memsw.limit_in_bytes"]
    monkeypatch.setitem(V1_FILES, "memory", files)
    kernel.mount_v1("memory")
    hierarchy = Hierarchy(state, look())
    made = hierarchy.make(Wanted(1 << 20, None, None), "x")
    assert Path(made.paths[0], "memory.swappiness").read_text().strip() == "0"
    assert made.cpu_usage_us() is None
    with pytest.raises(HostError, match="cannot be frozen"):
        made.freeze()
    made.release()
    hierarchy.close()


def test_hybrid_takes_each_controller_where_it_is(kernel: Kernel, state: str) -> None:
    kernel.mount_v1("memory")
    kernel.mount_v1("freezer")
    kernel.mount_v2("pids")
    hierarchy = Hierarchy(state, look())
    assert hierarchy.strength("memory")[1] == f"cgroup v1 memory at {kernel.top}/memory/nsbox"
    assert hierarchy.strength("pids")[1] == f"cgroup v2 pids at {kernel.top}/v2/nsbox"
    available, reason, remedy = hierarchy.strength("cpu")
    assert not available
    assert "no cgroup hierarchy here has the cpu controller" in reason
    assert "cgroup_disable=cpu" in remedy
    made = hierarchy.make(Wanted(1 << 20, 3, None), "x")
    assert len(made.join) == 1
    assert made.into >= 0
    assert made.cpu_usage_us() == 300  # the tree knows it without the controller
    made.release()
    hierarchy.close()


def test_nothing_mounted(kernel: Kernel, state: str) -> None:
    available, reason, remedy = Hierarchy(state, look()).strength("memory")
    assert (available, reason) == (False, "no cgroup file system is mounted")
    assert "mount -t cgroup2" in remedy


def test_missing_control_file_is_named(kernel: Kernel, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(V1_FILES, "cpu", {})  # a kernel without CONFIG_CFS_BANDWIDTH
    kernel.mount_v1("cpu")
    hierarchy = Hierarchy(state, look())
    with pytest.raises(HostError, match=r"the kernel has no cpu.cfs_quota_us in .*/cpu/nsbox/"):
        hierarchy.make(Wanted(None, None, 1.0), "x")
    hierarchy.close()
    assert not os.path.exists(kernel.top / "cpu" / "nsbox")


def test_directories_removed_under_us_are_made_again(kernel: Kernel, state: str) -> None:
    kernel.mount_v1("memory")
    kernel.mount_v1("pids")
    hierarchy = Hierarchy(state, look())
    first = hierarchy.make(Wanted(1 << 20, 3, None), "x")
    first.release()
    for name in ("memory", "pids"):
        parent = kernel.top / name / "nsbox"
        for path in [*parent.iterdir(), parent]:
            if path.is_dir():
                os.rmdir(path)
    made = hierarchy.make(Wanted(1 << 20, 3, None), "y")
    assert all(map(os.path.isdir, made.paths))
    made.release()
    hierarchy.close()


@pytest.mark.parametrize(
    "name, gone",
    [
        (f"{ME}-1", True),  # the pid was used again
        ("1-" + cgroup_nest.start_time(1), False),
        ("4194304-5", True),  # above the highest pid
        ("cgroup.procs", False),
        ("x-5", False),
        ("5", False),
    ],
)
def test_owner_is_gone(name: str, gone: bool) -> None:
    assert cgroup_nest.owner_is_gone(name) is gone


def test_sweep(kernel: Kernel, state: str) -> None:
    point = kernel.mount_v1("memory")
    mine = Hierarchy(state, look())
    made = mine.make(Wanted(1 << 20, None, None), "x")
    os.makedirs(f"{point}/nsbox/4194304-5/1-x")
    os.mkdir(f"{point}/nsbox/unrelated")
    assert sweep_places(state, look()) == [f"cgroup {point}/nsbox/4194304-5 of process 4194304, which is gone: removed"]
    assert os.path.isdir(f"{point}/nsbox/unrelated")
    assert all(map(os.path.isdir, made.paths))
    made.release()
    mine.close()


def test_sweep_finds_groups_of_another_session(kernel: Kernel, state: str) -> None:
    point = kernel.mount_v2("memory pids", own="/a", shared="memory pids")
    kernel.read_only = {point}
    for name in ("a", "b"):
        kernel.group(f"{point}/{name}", processes=ME, shared="memory pids")
    hierarchy = Hierarchy(state, look())
    hierarchy.make(Wanted(1 << 20, None, None), "x").release()
    hierarchy.close()
    os.mkdir(f"{point}/a/nsbox")
    os.makedirs(f"{point}/a/nsbox/4194304-5/1-x")
    kernel.own = "0::/b\n"
    assert sweep_places(state, look()) == [
        f"cgroup {point}/a/nsbox/4194304-5 of process 4194304, which is gone: removed"
    ]
    assert not os.path.exists(f"{point}/a/nsbox")


@pytest.mark.parametrize(
    "root, path, shown",
    [
        ("/", "/a/b", "/x/a/b"),
        ("/", "/", "/x"),
        ("/docker/1", "/docker/1/a", "/x/a"),
        ("/docker/1", "/docker/1", "/x"),
        ("/docker/1", "/docker/12", None),
        ("/", "/../other", None),
    ],
)
def test_where_a_group_shows(root: str, path: str, shown: str | None) -> None:
    assert fs.Mount(2, "/x", root, frozenset()).directory(path) == shown


def test_mountinfo() -> None:
    text = (
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "33 31 0:30 / /odd\\040place rw - cgroup cgroup rw,xattr,release_agent=/usr/lib/agent,name=systemd\n"
        "34 31 0:31 /a /v2 rw shared:3 master:1 - cgroup2 none rw,nsdelegate\n"
        "35 31 0:32 / /proc rw - proc proc rw\n"
    )
    found = fs.mounts(text)
    assert [(mount.version, mount.point, mount.root) for mount in found] == [
        (1, "/sys/fs/cgroup/cpu,cpuacct", "/"),
        (1, "/odd place", "/"),
        (2, "/v2", "/a"),
    ]
    assert found[0].controllers == {"cpu", "cpuacct"}
    assert fs.memberships("3:cpu,cpuacct:/a:b\n0::/c\n") == {"cpu": "/a:b", "cpuacct": "/a:b", "": "/c"}


@pytest.mark.parametrize("work", [lambda h: h.make(Wanted(None, None, None), "x"), lambda h: h.refill()])
def test_without_any_cgroup_an_empty_wish_is_granted(
    kernel: Kernel, state: str, work: Callable[[Hierarchy], object]
) -> None:
    hierarchy = Hierarchy(state, look())
    work(hierarchy)
    made = hierarchy.make(Wanted(None, None, None), "x")
    assert (made.join, made.into, made.paths) == ((), -1, ())
    assert not made.kill()
    assert made.release()
    hierarchy.close()
