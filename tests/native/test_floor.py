"""The floor that `nsbox bench` compares with: real namespaces, real failures."""

import errno
import os
import stat
from pathlib import Path

import pytest

from nsbox._native import lib
from nsbox.bench.layers import NAMESPACES, everything, floor

LINKS = {"mount": "mnt"}
USER = dict(NAMESPACES)["user"]


@pytest.mark.parametrize(("name", "flag"), NAMESPACES)
def test_each_flag_gives_its_namespace(tmp_path: Path, name: str, flag: int) -> None:
    link = LINKS.get(name, name)
    script = tmp_path / "tell"
    # pid: the namespace of children is another link, and /proc is the host's; $$ is what the shell sees itself as.
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nreadlink /proc/self/ns/{link} > {tmp_path}/seen\n")
    script.chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    os.chmod(tmp_path, 0o777)  # root is nobody there without an id map
    status = lib.nsb_floor(flag | USER, 0, os.fsencode(script))
    assert os.WIFEXITED(status)
    if name == "pid":
        assert (tmp_path / "pid").read_text() == "1\n"
    else:
        assert status == 0
        assert (tmp_path / "seen").read_text().strip() != os.readlink(f"/proc/self/ns/{link}")


def test_without_flags_everything_is_shared(tmp_path: Path) -> None:
    script = tmp_path / "tell"
    script.write_text(f"#!/bin/sh\nreadlink /proc/self/ns/net > {tmp_path}/seen\n")
    script.chmod(0o755)
    assert lib.nsb_floor(0, 0, os.fsencode(script)) == 0
    assert (tmp_path / "seen").read_text().strip() == os.readlink("/proc/self/ns/net")


def test_failures_are_told() -> None:
    assert os.WEXITSTATUS(lib.nsb_floor(0, 0, b"/bin/false")) == 1
    assert os.WEXITSTATUS(lib.nsb_floor(0, 0, b"/nonexistent")) == 127
    assert lib.nsb_floor(0x00020000 | 0x00000200, 0, b"/bin/true") == -errno.EINVAL  # CLONE_NEWNS with CLONE_FS
    with pytest.raises(RuntimeError, match="errno 22"):
        floor(0x00020000 | 0x00000200)()


def test_everything_at_once_with_loopback() -> None:
    everything()()
