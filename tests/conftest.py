"""Around every test that launches something: the host must look afterwards as it did before."""

import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests below these folders launch sandboxes.
GUARDED = {"host", "native", "escape", "faults", "cases", "environments"}
# A kernel worker tears network namespaces down, and whoever inherits orphans reaps them: both take a moment.
PATIENCE_S = 3.0
# Tests of attacks are called after them, as in docs/threat-model.md; tests/cases has names of another list.
ATTACK = re.compile(r"test(_[KFNRS]\d\d)+(_|\b)")
# Made in the temporary directory by the build or by pytest, not by a sandbox.
NOT_OURS = (
    "nsbox-bootstrap.",
    "nsbox-build-",
    "nsbox-ci.",
    "nsbox-demo.",
    "nsbox-selftest-",
    "nsbox-vm-",
    "pytest-of-",
)
# Kept as long as the process lives: what each kind of sandbox is built on, and groups made ahead for the next launches.
KEPT = re.compile(r"/nsbox/skeleton|/nsbox/\d+-\d+( \(deleted\))?$|/nsbox/[^/]+/\d+-ready")

# `./bootstrap sanitize`: the sanitizer is in this process by now. Foreign programs do without it: some hang with it.
if "libasan" in os.environ.get("LD_PRELOAD", ""):
    del os.environ["LD_PRELOAD"]

Snapshot = dict[str, set[str]]

# A machine that is busy makes no test fail, and neither does the luck of one run: NSBOX_EXPLORE=1 tries other examples.
settings.register_profile(
    "nsbox",
    deadline=None,
    derandomize="NSBOX_EXPLORE" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("nsbox")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _descriptors() -> set[str]:
    """Open descriptors with what they lead to. Objects without a name carry the inode, so that a swapped one shows."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if not KEPT.search(target):
            found.add(f"{name} -> {target}")
    return found


def _process_table() -> dict[int, tuple[int, str]]:
    """pid → (parent, description) of every process on the host, with the start time to tell a reused pid."""
    table = {}
    for name in os.listdir("/proc"):
        stat = _read(f"/proc/{name}/stat") if name.isdigit() else ""
        if stat:
            # The command is in parentheses and may hold any character, also ")".
            comm = stat[stat.index("(") + 1 : stat.rindex(")")]
            fields = stat[stat.rindex(")") + 2 :].split()
            table[int(name)] = (int(fields[1]), f"pid {name} {comm} state {fields[0]} started {fields[19]}")
    return table


def _descendants() -> set[str]:
    """All processes below this one; their state is left out, except that a zombie is named as such."""
    table = _process_table()
    below = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in table.items() if parent in below} - below
        below |= more
        grown = bool(more)
    found = set()
    for pid in below - {os.getpid()}:
        what, _, rest = table[pid][1].partition(" state ")
        state, _, started = rest.partition(" ")
        found.add(f"{what} {'zombie ' if state == 'Z' else ''}{started}")
    return found


def _cgroups() -> set[str]:
    """Groups of this process. Those of a killed one stay until the next one starts: tests that kill look themselves."""
    own = f"/nsbox/{os.getpid()}-"
    found: set[str] = set()
    for directory, names, _ in os.walk("/sys/fs/cgroup"):
        found.update(os.path.join(directory, name) for name in names)
    return {name for name in found if own in name and not KEPT.search(name)}


def _files() -> set[str]:
    found: set[str] = set()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    for state in ["/run/nsbox", *([f"{runtime}/nsbox"] if runtime else [])]:
        for directory, names, files in os.walk(state):
            # Skeletons are a cache, made once for each kind of sandbox.
            names[:] = [name for name in names if not name.startswith(("skeleton-", ".draft-"))]
            found.update(os.path.join(directory, name) for name in [*names, *files])
    for directory in {tempfile.gettempdir(), "/tmp", "/dev/shm"}:
        names = os.listdir(directory) if os.access(directory, os.R_OK) else []
        found.update(f"{directory}/{name}" for name in names if "nsbox" in name and not name.startswith(NOT_OURS))
    return found


def _threads() -> set[str]:
    """Threads by name, and as the kernel counts them; but not the library's own, which comes and goes with its work."""
    own = [thread for thread in threading.enumerate() if thread.name.startswith("nsbox-")]
    tasks = set(os.listdir("/proc/self/task")) - {str(thread.native_id) for thread in own}
    return {f"{thread.name} {thread.ident}" for thread in threading.enumerate() if thread not in own} | {
        f"task {name}" for name in tasks
    }


def snapshot() -> Snapshot:
    """What a sandbox could leave behind, by kind."""
    return {
        "descriptors": _descriptors(),
        "threads": _threads(),
        "processes": _descendants(),
        "mounts": set(_read("/proc/self/mountinfo").splitlines()),
        "cgroups": _cgroups(),
        "network links": {line.split(":")[0].strip() for line in _read("/proc/net/dev").splitlines()[2:]},
        "files": _files(),
    }


def difference(before: Snapshot, after: Snapshot) -> list[str]:
    """One line for each thing that came or went."""
    lines = []
    for kind, old in before.items():
        lines += [f"{kind}: + {item}" for item in sorted(after[kind] - old)]
        # A thread that has been joined, or the init of the sandbox before, may be listed a moment longer.
        if kind not in ("threads", "processes"):
            lines += [f"{kind}: - {item}" for item in sorted(old - after[kind])]
    return lines


def start_helper() -> None:
    """Launch once ahead: what the library keeps for the life of the process is then there, and no test is blamed."""
    import nsbox

    nsbox.run(["true"])
    wait_for_rest()


def wait_for_rest() -> None:
    """Until nothing changes any more: what a run leaves is given back behind it."""
    last: Snapshot = {}
    now = snapshot()
    while last != now:
        time.sleep(0.1)
        last, now = now, snapshot()


def until(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    """Whether ``condition`` came true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def descriptor_count(pick: Callable[[list[int]], int] = min) -> int:
    """How many are open, while the library puts away what it does behind a run and makes ready what the next one needs:
    at most (``max``) before something that must not leak, at least (``min``) after it."""
    from nsbox import janitor

    janitor.flush()
    counts = []
    for _ in range(20):
        counts.append(len(os.listdir("/proc/self/fd")))
        time.sleep(0.01)
    return pick(counts)


@pytest.fixture(scope="session")
def helper_process() -> None:
    """The library's long-lived helper process runs."""
    start_helper()


@pytest.fixture(scope="session")
def gateway_thread(helper_process: None) -> None:
    """The gateway's thread, which the library keeps once it was needed, is there before a test is looked at."""
    import nsbox

    nsbox.run(["true"], net="filtered", allow=["example.org"])
    wait_for_rest()


@pytest.fixture(autouse=True)
def host_unchanged(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a launching test that leaves the host other than it found it."""
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    if folder not in GUARDED or request.node.get_closest_marker("leaves_traces"):
        yield
        return
    request.getfixturevalue("helper_process")
    before = snapshot()
    yield
    deadline = time.monotonic() + PATIENCE_S
    while (left := difference(before, snapshot())) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        pytest.fail("the test changed the host:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="session")
def as_root() -> bool:
    """Whether the caller is root on the host."""
    return os.geteuid() == 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of attacks, wherever they are."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder == "escape" or (ATTACK.match(item.name) and folder != "cases"):
            item.add_marker("attack")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The marks `root` and `user` skip a test for the other kind of caller, with the reason."""
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root; `./bootstrap test` as root runs it")
    if item.get_closest_marker("user") and os.geteuid() == 0:
        pytest.skip("needs an ordinary user; `./bootstrap test` runs it as one as well")


@pytest.fixture(scope="session", autouse=True)
def told(record_testsuite_property: Callable[[str, object], None]) -> None:
    """A JUnit file says where it was made: tests.escape.table records by that."""
    record_testsuite_property("kernel", os.uname().release)
    record_testsuite_property("caller", "root" if os.geteuid() == 0 else f"uid {os.geteuid()}")


def pytest_report_header() -> str:
    caller = "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"
    return f"caller: {caller} (NSBOX_TEST_AS={os.environ.get('NSBOX_TEST_AS', '')}), kernel {os.uname().release}"
