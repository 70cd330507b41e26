"""nsbox where people really run it: each place either gives sandboxes, or says in one line what it needs."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).parent
ROOT = os.geteuid() == 0
KERNEL = tuple(map(int, os.uname().release.split(".")[:2]))
ATTEMPTS = ("plain", "read_only", "workspace", "read_write", "memory", "egress")
NO_PROC = r"no /proc of its own can be mounted: .*mounted over /proc/.*; start the container with: .*systempaths"
NO_NAMESPACES = r"namespaces cannot be made here: .*; .*"
FILTERED = NO_NAMESPACES.replace(".*", ".*a seccomp filter.*", 1)


class Place(NamedTuple):
    """``steps`` are those of outer.py; ``refused`` is what is said where no sandbox can be had."""

    name: str
    steps: str
    refused: str = ""
    watched: bool = False  #: no cgroup can be made there
    only_root: bool = False


IMAGE = "rest pids image dev"
PLACES = (
    # Containers of an ordinary user.
    Place("rootless container", f"user {IMAGE}"),
    Place("rootless container without cgroups", f"user {IMAGE} read_only_cgroup no_shm", watched=True),
    Place("rootless container, /proc masked", f"user {IMAGE} masked_proc", NO_PROC),
    Place("rootless container, default filter", f"user {IMAGE} masked_proc docker_seccomp", FILTERED),
    # Containers of root.
    Place("privileged container", f"mounts {IMAGE}", only_root=True),
    Place("privileged container with a volume", f"mounts {IMAGE} volume", only_root=True),
    Place("container without CAP_SYS_ADMIN", f"mounts {IMAGE} docker_capabilities", only_root=True),
    Place("container as by default", f"mounts {IMAGE} masked_proc read_only_cgroup docker_capabilities docker_seccomp",
          FILTERED, only_root=True),
    # Hosts that lack something.
    Place("chroot", "host chroot", NO_NAMESPACES.replace(".*", ".*chroot.*", 1)),
    Place("no /dev/shm", "host no_shm"),
    Place("64 descriptors", "host few_files"),
    Place("12 descriptors", "host tiny_files", r"Too many open files: .* 12 .*RLIMIT_NOFILE.*; .*(?:nofile|ulimit)"),
    Place("read-only cgroups", "host read_only_cgroup", watched=True),
    Place("no cgroups", "host no_cgroup", watched=True),
    Place("/proc masked", "host masked_proc", NO_PROC),
    Place("as pid 1", "host pids"),
    # Services of systemd.
    Place("hardened service", "host protected no_new_privs", watched=True),
    Place("service with ProtectKernelTunables", "host tunables", NO_PROC + ".*ProtectKernelTunables"),
    Place("service without @mount", "host no_mounts", r"set-up stopped at .*; .*a security policy .* forbids mounts: "),
    Place("service without namespaces", "host protected restrict_namespaces", FILTERED),
)  # fmt: skip


def report_of(place: Place) -> dict[str, Any]:
    """What inside.py found in a place."""
    steps = place.steps.replace("host", "mounts" if ROOT else "ordinary")
    command = [sys.executable, str(HERE / "outer.py"), *steps.split(), "--", sys.executable, str(HERE / "inside.py")]
    with tempfile.TemporaryDirectory(prefix="place-") as own:
        env = {**os.environ, "TMPDIR": own, "PYTHONPATH": str(HERE.parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
        assert not os.listdir(own), "the place left something"
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_refused(found: dict[str, Any], said: str) -> None:
    for name in ATTEMPTS:
        assert found[name]["status"] == 125, (name, found[name])
        assert re.fullmatch(rf"nsbox: (?:{said}).*\n", found[name]["said"]), (name, found[name]["said"])
    assert found["untouched"]
    assert not found["exported"]


def check_works(found: dict[str, Any], place: Place) -> None:
    said = {name: found[name]["said"] for name in ATTEMPTS}
    assert found["plain"]["status"] == 0, said["plain"]
    uid, pid, file, processes = found["plain"]["stdout"].split()
    assert (uid, file) == ("1000", "x")
    assert int(pid) < 10, "a pid namespace of its own"
    assert int(processes) < 10, "and a /proc that shows no other"
    assert found["read_only"]["stdout"] == "hello\n", said["read_only"]
    assert found["memory"]["reason"] == "memory", found["memory"]
    assert found["egress"]["status"] == 0, said["egress"]
    strength = {found["plain"]["enforced"][limit]["strength"] for limit in ("memory", "pids", "cpu")}
    assert strength <= ({"watched"} if place.watched else {"watched", "kernel"})
    assert found["workspace"]["status"] == 0, said["workspace"]
    assert found["workspace"]["stdout"].split() == ["hello", "d", "file", "old"]
    assert found["exported"] == ["d", "d/new", "file"]
    assert found["untouched"]
    check_shared(found, place, said["read_write"])


def check_shared(found: dict[str, Any], place: Place, said: str) -> None:
    """A privileged caller on a file system without idmapped mounts: the workspace is a copy, and --rw is refused."""
    volume = "volume" in place.steps and KERNEL >= (6, 3)
    unmapped = "image" in place.steps and place.steps.startswith("mounts") and "docker_capabilities" not in place.steps
    copied = "the workspace is a copy" in found["workspace"]["enforced"]["overlay"]["how"]
    assert copied == (unmapped and not volume)
    if copied:
        assert found["read_write"]["status"] == 125
        assert re.fullmatch(r"nsbox: .* does not take idmapped mounts .*on a volume.*\n", said)
    else:
        assert found["read_write"]["status"] == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=[place.name.replace(" ", "-") for place in PLACES])
def test_place(place: Place) -> None:
    if place.only_root and not ROOT:
        pytest.skip("needs root; `./bootstrap test` as root runs it")
    found = report_of(place)
    if "pids" in place.steps.split():
        assert found["pid"] == 1
    if place.refused:
        check_refused(found, place.refused)
    else:
        check_works(found, place)
    # Doctor says the same of the place; but itself it can do with few descriptors.
    assert found["doctor"] == (125 if place.refused and "tiny_files" not in place.steps else 0)
    assert found["left"] == []


@pytest.mark.root
def test_root_without_rights_says_whose_id_the_payload_has() -> None:
    """Without CAP_SYS_ADMIN there is no range of ids: the payload is root's, powerless, and that is told."""
    found = report_of(Place("", f"mounts {IMAGE} docker_capabilities"))
    assert "root's" in found["plain"]["enforced"]["user_ns"]["how"]
