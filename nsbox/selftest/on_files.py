"""Attempts on files and descriptors of the host, and on what it does with the outputs."""

import contextlib
import hashlib
import importlib
import os
import pickle
import shutil
import socket
from collections.abc import Iterator

from nsbox.errors import NsboxError
from nsbox.selftest.stage import Noted, Stage, noted, staged

SECRET = "selftest: not for the sandbox"


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def overwritten(program: str) -> bool:
    """The control of F01: whether a program of our own, at rest, can be overwritten by way of a path descriptor."""
    held = os.open(program, os.O_PATH)
    try:
        writable = os.open(f"/proc/self/fd/{held}", os.O_WRONLY)
        try:
            return os.write(writable, b"overwritten") == 11
        finally:
            os.close(writable)
    finally:
        os.close(held)


@staged("F01")
def runtime(stage: Stage) -> Iterator[Noted]:
    """The files that sandboxes are started from are the same before and after."""
    from nsbox import _native

    library = str(importlib.import_module("nsbox._native_ffi").__file__)

    program = shutil.copy("/usr/bin/true" if os.path.exists("/usr/bin/true") else "/bin/true", stage.folder)
    works = overwritten(program)
    stage.run(["true"])
    files = [os.path.realpath("/usr/bin/python3"), library, f"/proc/{_native.zygote().pid}/exe"]
    files = [file for file in files if os.access(file, os.R_OK)]
    before = [_digest(file) for file in files]
    found = stage.inside("write_own_exe", "write_init_exe", uid=0)
    same = [_digest(file) for file in files] == before
    yield noted(
        "F01",
        "the helper, the interpreter and the library afterwards",
        works=works,
        stopped=same and "done" not in found.values() and len(found) == 2,
        control="an own program was overwritten",
        inside="unchanged" if same else "changed",
    )


@staged("F03")
def descriptors(stage: Stage) -> Iterator[Noted]:
    """One of each kind is held open, inheritable."""
    with contextlib.ExitStack() as opened:
        held = [
            os.memfd_create("selftest"),
            os.open("/", os.O_PATH),
            *(end.detach() for end in socket.socketpair()),
            *os.pipe(),
            os.pidfd_open(os.getpid()),
        ]
        for fd in held:
            opened.callback(os.close, fd)
            os.set_inheritable(fd, True)
        outside = stage.outside("inherited_descriptors", close_fds=False)["inherited_descriptors"]
        inside = stage.inside("inherited_descriptors").get("inherited_descriptors", "")
    yield noted(
        "F03",
        "descriptors of every kind",
        works=outside == "done",
        stopped=inside == "none",
        control=outside,
        inside=inside,
    )


@staged("F05")
def paths_from_outside(stage: Stage) -> Iterator[Noted]:
    """A command plants links; the host reads and writes files of the sandbox by those names."""
    from nsbox.box import Sandbox

    target = os.path.join(stage.place("f05"), "target")
    with open(target, "w") as file:
        file.write(SECRET)
    code = "import os, sys; os.symlink(sys.argv[1], 'link'); os.symlink(os.path.dirname(sys.argv[1]), 'folder')"
    up = "../" * 12 + target.lstrip("/")
    seen = []
    with Sandbox(stage.spec()) as box:
        box.run([*stage.command()[:1], "-c", code, target]).check()
        for name in ("link", "folder/target", up, target):
            with contextlib.suppress(NsboxError, OSError):
                seen.append(box.read_file(name))
            with contextlib.suppress(NsboxError, OSError):
                box.write_file(name, "overwritten")
    with open(target) as file:
        kept = file.read() == SECRET
    yield noted(
        "F05",
        "links and `..` in names that the host reads and writes",
        works=os.path.exists(up if os.path.isabs(up) else os.path.join("/", up.replace("../", ""))),
        stopped=kept and SECRET.encode() not in b"".join(seen),
        control="the file is there outside",
        inside="not reached" if kept else "overwritten",
    )


def beneath(top: str | os.PathLike[str]) -> dict[bytes, bytes]:
    """Every file and link beneath a folder, with what it holds; links are followed by nobody."""
    found = {}
    for directory, names, files in os.walk(os.fsencode(top)):
        for name in [*names, *files]:
            path = os.path.join(directory, name)
            if os.path.islink(path):
                found[os.path.relpath(path, os.fsencode(top))] = b"-> " + os.readlink(path)
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    found[os.path.relpath(path, os.fsencode(top))] = file.read()
    return found


def _workspace(stage: Stage, word: str, **options: object) -> tuple[str, str]:
    """Runs one attempt of ``attempts.outputs`` in a workspace, exported and applied: (export, workspace)."""
    workspace, out = stage.place("work"), stage.place("out")
    stage.program(word, workspace=(workspace, "/work"), cwd="/work", export=out, apply=True, **options)
    return out, workspace


@staged("F06")
def planted_links(stage: Stage) -> Iterator[Noted]:
    """The host collects a tree full of links."""
    target = os.path.join(stage.place("f06"), "target")
    with open(target, "w") as file:
        file.write(SECRET)
    control = stage.place("control")
    stage.outside_bytes(f"plant_links:{target}", cwd=control)
    shutil.copytree(control, f"{control}-copy")
    works = SECRET.encode() in beneath(f"{control}-copy").values()
    found = [beneath(top) for top in _workspace(stage, f"plant_links:{target}")]
    leaked = any(SECRET.encode() in tree.values() for tree in found)
    links = any(held.startswith(b"-> /") for tree in found for held in tree.values())
    yield noted(
        "F06",
        "links in what is exported and applied",
        works=works,
        stopped=not leaked and not links,
        control="a plain copy holds the secret",
        inside="followed" if leaked else "left behind",
    )


@staged("F12")
def trusted_files(stage: Stage) -> Iterator[Noted]:
    """Hooks, start files and the like: held back, unless each is let through by name."""
    from nsbox.selftest.attempts.outputs import HOOKS

    word = "plant_hooks:true"
    through = _workspace(stage, word, allow_trusted=list(HOOKS))
    works = all(set(map(os.fsencode, HOOKS)) <= beneath(top).keys() for top in through)
    arrived = {name for top in _workspace(stage, word) for name in beneath(top)}
    yield noted(
        "F12",
        f"{len(HOOKS)} files that tools act upon by themselves",
        works=works,
        stopped=not arrived,
        control="let through by name, they arrive",
        inside=f"{len(arrived)} arrived",
    )


def bomb(marker: str) -> bytes:
    """What makes a folder when it is unpickled."""

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (marker,)

    return pickle.dumps(Bomb())


@staged("F13")
def evaluated(stage: Stage) -> Iterator[Noted]:
    """Output that is a program to whoever unpickles or evaluates it."""
    marker = os.path.join(stage.folder, "evaluated")
    data = bomb(marker)
    pickle.loads(data)
    works = os.path.isdir(marker)
    os.rmdir(marker)
    text = data + f"__import__('os').mkdir({marker!r})\n".encode()
    result = stage.run(["cat"], stdin=text)
    result.to_json()
    came = os.path.exists(marker)
    yield noted(
        "F13",
        "a pickle and an expression on standard output",
        works=works,
        stopped=not came and result.stdout == text,
        control="unpickled, it acts",
        inside="it acted" if came else "bytes like others",
    )


@staged("F14")
def hostile_names(stage: Stage) -> Iterator[Noted]:
    """Names that confuse terminals, tools and encodings."""
    from nsbox.selftest.attempts.outputs import NAMES

    control = stage.place("names")
    stage.outside_bytes("plant_names:all", cwd=control)
    wanted = {name: name for name in NAMES}
    found = [beneath(top) for top in _workspace(stage, "plant_names:all")]
    yield noted(
        "F14",
        f"{len(NAMES)} names of any bytes",
        works=beneath(control) == wanted,
        stopped=all(tree == wanted for tree in found),
        control="they can be made outside",
        inside="all arrived as they are" if all(tree == wanted for tree in found) else "changed on the way",
    )
