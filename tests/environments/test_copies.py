"""A workspace on overlayfs, for a root caller: it is copied for each sandbox. See nsbox/copyin.py."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PREAMBLE = """
import os, signal, subprocess, sys, time
from pathlib import Path
import nsbox
from nsbox import gc, janitor
from nsbox.errors import HostError

WORK = Path("/workspace/w")
WORK.mkdir()
(WORK / "file").write_text("hello\\n")

def copies():
    # Before Linux 6.6 scratch files of a workspace, and with them the copy, are on disk.
    janitor.flush()
    return [str(path) for place in ("/run/nsbox", "/var/tmp/nsbox-0") for path in Path(place).glob("nsbox-*/copy")]

def shell(text, **options):
    result = nsbox.run(["sh", "-c", text], workspace=WORK, **options)
    assert "the workspace is a copy" in result.enforced["overlay"]["how"], result.enforced
    return result.stdout_text
"""


def in_a_container(code: str, folder: Path) -> str:
    """What a program printed whose root file system is an overlay."""
    file = folder / "embedder.py"
    file.write_text(PREAMBLE + textwrap.dedent(code))
    outer = [sys.executable, str(HERE / "outer.py"), "mounts", "image", "dev", "--", sys.executable, str(file)]
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(outer, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.root
def test_owners_modes_and_links(tmp_path: Path) -> None:
    code = """
    (WORK / "tool").write_text("#!/bin/sh\\necho ran\\n")
    (WORK / "tool").chmod(0o700)
    (WORK / "hidden").write_text("secret")
    (WORK / "hidden").chmod(0o600)
    os.chown(WORK / "hidden", 1234, 1234)
    os.symlink("file", WORK / "link")
    os.link(WORK / "file", WORK / "same")
    print(shell("./tool; cat link; stat -c %u:%a tool hidden; cat hidden 2>&1 | grep -c denied"), end="")
    print(shell("stat -c %h same"), end="")
    print(copies())
    """
    lines = in_a_container(code, tmp_path).splitlines()
    assert lines == ["ran", "hello", "1000:700", "65534:600", "1", "2", "[]"]


@pytest.mark.root
def test_groups_are_as_with_ids_that_are_mapped(tmp_path: Path) -> None:
    code = """
    os.chown(WORK, 1234, 100)
    for name, uid, gid in (("group", 0, 100), ("number", 0, 1234), ("owner", 1234, 100)):
        (WORK / name).write_text(name)
        (WORK / name).chmod(0o640)
        os.chown(WORK / name, uid, gid)
    print(shell("stat -c %u:%g group number owner; cat group owner; cat number 2>&1 | grep -c denied"))
    """
    lines = in_a_container(code, tmp_path).split()
    assert lines == ["65534:1000", "65534:65534", "1000:1000", "groupowner1"]


@pytest.mark.root
def test_changes_go_back_to_the_directory_itself(tmp_path: Path) -> None:
    code = """
    (WORK / "gone").touch()
    shell("echo more >>file; rm gone; mkdir d; echo new >d/new", apply=True)
    print(sorted(str(path.relative_to(WORK)) for path in WORK.rglob("*")), (WORK / "file").read_text().split())
    print({path.stat().st_uid for path in WORK.rglob("*")})
    with nsbox.Sandbox(workspace=WORK) as box:
        box.run(["sh", "-c", "echo again >>file"])
        print([(change.change, change.path) for change in box.changes().entries])
        print(box.apply().applied, (WORK / "file").read_text().split())
    print(copies())
    """
    assert in_a_container(code, tmp_path).splitlines() == [
        "['d', 'd/new', 'file'] ['hello', 'more']",
        "{0}",
        "[('modified', 'file')]",
        "('file',) ['hello', 'more', 'again']",
        "[]",
    ]


@pytest.mark.root
def test_what_the_host_changed_after_the_copy_is_a_conflict(tmp_path: Path) -> None:
    code = """
    with nsbox.Pool(workspace=WORK, apply=True, size=1) as pool, nsbox.Pool(workspace=WORK, size=1) as boxes:
        assert pool.wait_full(60) and boxes.wait_full(60)
        (WORK / "file").write_text("the host's\\n")
        time.sleep(0.1)
        result = pool.run(["sh", "-c", "echo more >>file"])
        print([(change["path"], change["action"]) for change in result.boundary["outputs"]])
        with nsbox.Sandbox.from_pool(boxes) as box:
            box.run(["sh", "-c", "echo more >>file"]).check()
            print([held.path for held in box.apply().conflicts])
    print((WORK / "file").read_text().split())
    """
    assert in_a_container(code, tmp_path).splitlines() == ["[('file', 'conflict')]", "['file']", "['the', \"host's\"]"]


@pytest.mark.root
def test_it_is_held_to_the_disk_limit(tmp_path: Path) -> None:
    code = """
    (WORK / "large").write_bytes(os.urandom(3 << 20))
    for option in ({}, {"disk": "1M"}, {"disk": "unlimited"}):
        try:
            print(shell("wc -c <large", **option).strip())
        except HostError as error:
            print(error)
    print(copies())
    """
    lines = in_a_container(code, tmp_path).splitlines()
    assert lines[0] == lines[2] == str(3 << 20)
    assert "'/workspace/w' must be copied" in lines[1]
    assert "holds 3 MiB, more than the disk limit of 1 MiB; raise --disk" in lines[1]
    assert lines[3] == "[]"


@pytest.mark.root
def test_what_a_killed_owner_leaves_is_collected(tmp_path: Path) -> None:
    code = """
    run = f"import nsbox; nsbox.run(['sh', '-c', 'echo up; sleep 600'], workspace={str(WORK)!r}, on_stdout=print)"
    owner = subprocess.Popen([sys.executable, "-u", "-c", run], stdout=subprocess.PIPE)
    owner.stdout.readline()
    print(len(copies()))
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 120
    told = []
    while copies() and time.monotonic() < deadline:  # as soon as nothing runs in it any more
        told += gc.collect()
        time.sleep(0.05)
    print(copies() and (copies(), told))
    """
    assert in_a_container(code, tmp_path).splitlines() == ["1", "[]"]
