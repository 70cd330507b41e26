"""Attempts on secrets, on the record of what happened, and on the conditions of a run."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from nsbox.errors import HostError, NsboxError, SpecError
from nsbox.selftest.attempts.files import MARK
from nsbox.selftest.stage import FOLDER, Noted, Stage, noted, staged

_VALUE = b"s3kr1t-of-the-selftest"


@staged("S01")
def credentials(stage: Stage) -> Iterator[Noted]:
    """A variable of ours is looked for in every process inside."""
    name = "NSBOX_SELFTEST_TOKEN"
    os.environ[name] = stage.environment[name] = MARK
    try:
        outside = stage.outside("mark_of_the_caller")["mark_of_the_caller"]
        # Another host name is another plan: what is made ahead for a Spec was made before the variable was there.
        inside = stage.inside("mark_of_the_caller", hostname="selftest-s01").get("mark_of_the_caller", "")
    finally:
        del os.environ[name], stage.environment[name]
    yield noted(
        "S01",
        "a variable of the caller, in every process inside",
        works=outside == "done",
        stopped=inside == "not found",
        control=outside,
        inside=inside,
    )


@staged("S05")
def printed(stage: Stage) -> Iterator[Noted]:
    """A secret is printed."""
    from nsbox.secrets import Secret

    secret = [Secret("SELFTEST", value=_VALUE)]
    length = stage.inside("read:/run/secrets/SELFTEST", secrets=secret).get("read", "")
    result = stage.run(["cat", "/run/secrets/SELFTEST"], secrets=secret)
    masked = _VALUE not in result.stdout and _VALUE.decode() not in result.to_json()
    yield noted(
        "S05",
        "a secret on standard output, and in the report",
        works=length == f"read {len(_VALUE)}",
        stopped=masked and b"***" in result.stdout,
        control="inside it is read",
        inside="masked" if masked else "printed",
    )


@staged("S06")
def outlived(stage: Stage) -> Iterator[Noted]:
    """A secret is read again after its time, through a descriptor that was opened before."""
    from nsbox.secrets import Secret

    script = """
        exec 3< /run/secrets/SELFTEST; test -s /run/secrets/SELFTEST && echo was there
        n=0; while [ -e /run/secrets/SELFTEST ] && [ $n -lt 80 ]; do sleep 0.05; n=$((n+1)); done
        wc -c <&3; ls /run/secrets
    """
    result = stage.run(["sh", "-c", script], secrets=[Secret("SELFTEST", value=_VALUE, ttl=1)])
    said = [*result.stdout_text.split("\n"), "", ""]
    there = said[0] == "was there"
    kept = there and (said[1] != "0" or "SELFTEST" in said[2:])
    yield noted(
        "S06",
        "a secret of a second, after that",
        works=there,
        stopped=not kept,
        control="before, it was there",
        inside="still there" if kept else "gone",
    )


@staged("S07")
def record(stage: Stage) -> Iterator[Noted]:
    """The log is looked for inside; and a run whose log fails must not go on."""
    log = os.path.join(stage.place("log"), "boundary.log")
    stage.program(f"forge:{log}", log=log)
    with open(log, "rb") as file:
        said = file.read()
    whole = b"forged" not in said and b"sandbox.start" in said and b"sandbox.end" in said
    works = stage.outside(f"forge:{log}").get("forge") == "done"
    yield noted(
        "S07",
        "writing to the log from inside",
        works=works,
        stopped=whole,
        control="outside it can be forged",
        inside="whole" if whole else "forged or cut",
    )
    shared = stage.place("shared")

    def full(event: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    command = ["sh", "-c", "sleep 0.5; echo ran > /shared/ran"]
    stage.run(command, rw=[(shared, "/shared")])
    works = os.path.exists(f"{shared}/ran")
    os.unlink(f"{shared}/ran")
    try:
        stage.run(command, rw=[(shared, "/shared")], log=full)
        refused = "ran on"
    except NsboxError as error:
        refused = type(error).__name__
    yield noted(
        "S07",
        "running on while the log cannot be written",
        works=works,
        stopped=refused != "ran on" and not os.path.exists(f"{shared}/ran"),
        control="with a log that works, it runs",
        inside=refused,
    )


LEAVE = """
import os, socket, subprocess, time
for place in ("/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~")):
    with open(f"{place}/selftest-left", "w") as file: file.write("x")
server = socket.create_server(("127.0.0.1", 8124))
if os.fork() == 0:
    os.setsid()
    time.sleep(20)
    os._exit(0)
os._exit(0)
"""
FIND = """
import os, socket
found = [place for place in ("/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~"))
         if os.path.exists(f"{place}/selftest-left")]
try:
    socket.create_connection(("127.0.0.1", 8124), 1)
    found.append("port")
except OSError: pass
found += ["process"] if {name for name in os.listdir("/proc") if name.isdigit()} - {"1", str(os.getpid())} else []
print(*found, "end")
"""


@staged("S02")
def leases(stage: Stage) -> Iterator[Noted]:
    """Two leases of a pool, one after the other; the control is two commands of one sandbox."""
    from nsbox.box import Sandbox
    from nsbox.pool import Pool

    python = stage.command()[0]
    with Sandbox(stage.spec()) as box:
        box.run([python, "-c", LEAVE])
        control = box.run([python, "-c", FIND]).stdout_text.split()
    with Pool(stage.spec(), size=2) as pool:
        pool.run([python, "-c", LEAVE])
        found = [pool.run([python, "-c", FIND]).stdout_text.split() for _ in range(3)]
    yield noted(
        "S02",
        "files, processes and ports of the lease before",
        works="/tmp" in control,
        stopped=found == [["end"]] * 3,
        control=f"in one sandbox: {' '.join(control[:-1])}",
        inside=" ".join(word for row in found for word in row if word != "end") or "nothing",
    )


#: For a process of its own: a user namespace in which no other one can be made, and then a sandbox.
NO_NAMESPACES = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
uid, gid = os.getuid(), os.getgid()
if libc.unshare(0x10000000): sys.exit("unshare")
for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
    try: open(f"/proc/self/{name}", "w").write(text)
    except OSError: pass
open("/proc/sys/user/max_user_namespaces", "w").write("0")
import nsbox, nsbox.errors
try:
    print("ran", nsbox.run(["id", "-u"]))
except nsbox.errors.NsboxError as error:
    told = any(word in str(error) for word in ("max_user_namespaces", "nsbox doctor"))
    print("refused", type(error).__name__, told)
"""


def without_namespaces(folder: str) -> str:
    """What the process of ``NO_NAMESPACES`` says; ``folder`` is for its state. "" if it could not be made so."""
    above = os.path.dirname(os.path.dirname(FOLDER))
    path = os.pathsep.join(entry for entry in (above, *sys.path) if entry)
    env = {**os.environ, "XDG_RUNTIME_DIR": folder, "PYTHONPATH": path}
    argv = [sys.executable or "python3", "-c", NO_NAMESPACES]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env).stdout


@staged("S08")
def unavailable(stage: Stage) -> Iterator[Noted]:
    """A process that cannot have namespaces asks for a sandbox."""
    works = stage.run(["true"]).ok
    said = without_namespaces(stage.place("state"))
    yield noted(
        "S08",
        "a sandbox where no user namespace can be had",
        works=works and bool(said),
        stopped=not said.startswith("ran"),
        control="here it runs",
        inside=" ".join(said.split()[:2]) or "could not be attempted",
    )


def _mounted(stage: Stage, path: str, **options: object) -> str:
    try:
        result = stage.run(["cat", "/in/key"], ro=[(path, "/in")], **options)
    except (SpecError, HostError) as error:
        return type(error).__name__
    return "mounted" if result.ok else "not read"


@staged("S09")
def mounts(stage: Stage) -> Iterator[Noted]:
    """Folders of credentials in a home directory made for this, and a socket."""
    home, before = stage.place("home"), os.environ.get("HOME")
    os.environ["HOME"] = home
    try:
        for name in (".ssh", ".aws", ".config/gcloud", ".kube", ".docker"):
            folder = os.path.join(home, name)
            os.makedirs(folder)
            with open(f"{folder}/key", "w") as file:
                file.write("selftest")
            os.chmod(f"{folder}/key", 0o644)
            control, inside = _mounted(stage, folder, allow_sensitive=[folder]), _mounted(stage, folder)
            yield noted(
                "S09",
                f"mounting ~/{name}",
                works=control == "mounted",
                stopped=inside == "MountRefused",
                control=f"named as sensitive: {control}",
                inside=inside,
            )
    finally:
        if before is None:
            del os.environ["HOME"]
        else:
            os.environ["HOME"] = before
    path = os.path.join(stage.place("socket"), "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        inside = _mounted(stage, path)
    yield noted(
        "S09",
        "mounting a socket",
        works=os.path.exists(path),
        stopped=inside not in ("mounted", "not read"),
        control="it is there",
        inside=inside,
    )
