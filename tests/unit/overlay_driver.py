"""Runs in a mount namespace of its own: plays operations on a real overlay and says what it looks like, and what nsbox
makes of it. One JSON document a line in, one a line out.
"""

import base64
import hashlib
import json
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
from typing import Any

from nsbox import changes, transfer, tree

# Few names, so that operations meet; among them what is awkward.
NAMES = ("a", "b", "c", "with space", "line\nfeed", "\udcff\x1b[31m", ".git", "n" * 255)
Tree = dict[str, list[Any]]


def play(root: str, op: list[Any]) -> None:
    """One operation; what the kernel refuses does not happen."""
    kind, path, *rest = op
    path = os.path.join(root, path)
    try:
        PLAYERS[kind](root, path, *rest)
    except OSError:
        pass


def _nonblocking(path: str, flags: int) -> int:
    # A fifo without a reader must not hold us, and a link to /nonexistent/x must not be written through.
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)


def _write(_: str, path: str, content: str, size: int) -> None:
    with open(path, "wb", opener=_nonblocking) as file:
        file.write((content * size).encode())


def _rewrite(_: str, path: str) -> None:
    """The same content again: overlayfs copies the file up, and nothing has changed."""
    with open(path, "r+b", buffering=0, opener=_nonblocking) as file:
        data = file.read()
        file.seek(0)
        file.write(data)


def _sparse(_: str, path: str, size: int) -> None:
    with open(path, "ab", opener=_nonblocking) as file:
        file.truncate(size)


def _append(_: str, path: str, content: str) -> None:
    with open(path, "ab", opener=_nonblocking) as file:
        file.write(content.encode())


def _remove_tree(_: str, path: str) -> None:
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
    else:
        shutil.rmtree(path)


def _chmod(_: str, path: str, mode: int) -> None:
    if os.path.islink(path):
        return
    # Who is not root must be able to look at what it made.
    os.chmod(path, mode | (0o700 if os.geteuid() and os.path.isdir(path) else 0))


def _socket(_: str, path: str) -> None:
    # The path of a socket is at most 108 bytes: bind it from its directory.
    os.chdir(os.path.dirname(path))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.basename(path))


PLAYERS: dict[str, Any] = {
    "write": _write,
    "rewrite": _rewrite,
    "sparse": _sparse,
    "append": _append,
    "mkdir": lambda _, path: os.mkdir(path),
    "remove": _remove_tree,
    "rename": lambda root, path, to: os.rename(path, os.path.join(root, to)),
    "symlink": lambda _, path, target: os.symlink(target, path),
    "link": lambda root, path, to: os.link(path, os.path.join(root, to), follow_symlinks=False),
    "chmod": _chmod,
    "fifo": lambda _, path: os.mkfifo(path),
    "socket": _socket,
    "xattr": lambda _, path, value: os.setxattr(path, "user.test", value.encode(), follow_symlinks=False),
}


def picture(root: str) -> Tree:
    """path → [kind, mode, content, xattr] of everything in a tree, by ordinary means."""
    out: Tree = {}
    for directory, names, files in os.walk(root, onerror=_raise):
        for name in [*names, *files]:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            kind = tree.kind_of(status.st_mode)
            content, xattr = "", ""
            if kind == "file":
                with open(path, "rb") as file:
                    content = hashlib.sha256(file.read()).hexdigest()
            elif kind == "symlink":
                content = os.readlink(path)
            if kind in ("file", "dir"):
                try:
                    xattr = os.getxattr(path, "user.test").decode()
                except OSError:
                    pass
            mode = 0 if kind == "symlink" else stat.S_IMODE(status.st_mode)
            out[os.path.relpath(path, root)] = [kind, mode, content, xattr]
    return out


def _raise(error: OSError) -> None:
    raise error


def run(job: dict[str, Any], top: str) -> dict[str, Any]:
    """Play one example from start to end."""
    lower, scratch, merged = f"{top}/lower", f"{top}/scratch", f"{top}/merged"
    for path in (lower, scratch, merged):
        os.mkdir(path)
    for op in job["before"]:
        play(lower, op)
    _mount("-t", "tmpfs", "-o", "size=64m", "none", scratch)
    os.mkdir(f"{scratch}/u")
    os.mkdir(f"{scratch}/w")
    options = f"lowerdir={lower},upperdir={scratch}/u,workdir={scratch}/w,userxattr"
    _mount("-t", "overlay", "-o", options, "none", merged)
    os.chmod(merged, 0o755)
    for op in job["ops"]:
        play(merged, op)
    upper = os.open(f"{scratch}/u", tree.DIRECTORY)
    answer: dict[str, Any] = {"lower": picture(lower), "merged": picture(merged)}
    found = changes.scan(upper, lower)
    answer["changes"] = [entry._asdict() | {"before": None} for entry in found.entries]
    answer["truncated"] = found.truncated
    exported = transfer.export(found, upper, f"{top}/export", allow_trusted=True)
    answer["export"] = [exported._asdict(), picture(f"{top}/export")]
    # The descriptor outlives the mounts, as it does a sandbox.
    os.chdir("/")
    _unmount(merged)
    applied = transfer.apply(found, upper, lower, allow_trusted=True)
    answer["apply"] = [applied._asdict(), picture(lower)]
    os.close(upper)
    _unmount(scratch)
    return answer


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def _unmount(path: str) -> None:
    subprocess.run(["umount", path], check=True)


def random_ops(chance: random.Random, count: int) -> list[list[Any]]:
    """Operations for ``play``, most of which find something to work on."""
    names = ("a", "b", "c", *chance.sample(NAMES, 2))

    def path() -> str:
        return "/".join(chance.choice(names) for _ in range(chance.choice((1, 1, 2, 2, 3))))

    more: dict[str, Any] = {
        "write": lambda: [chance.choice("xy"), chance.choice((0, 1, 70000))],
        "append": lambda: ["z"],
        "sparse": lambda: [chance.choice((0, 1 << 20))],
        "rename": lambda: [path()],
        "link": lambda: [path()],
        "symlink": lambda: [chance.choice(("a", "../b", "/nonexistent/x", "a/../../x"))],
        "chmod": lambda: [chance.choice((0o600, 0o755, 0o700, 0o1777, 0o666))],
        "xattr": lambda: [chance.choice("12")],
    }
    kinds = chance.choices([*PLAYERS, "mkdir", "write"], k=count)
    return [[kind, path(), *more.get(kind, list)()] for kind in kinds]


def inside() -> None:
    """Play what standard input says in the working directory, and print what it looks like then."""
    root = os.getcwd()
    for op in json.load(sys.stdin):
        play(root, op)
    os.chdir(root)
    json.dump(picture(root), sys.stdout)


def main() -> None:
    """The loop."""
    if sys.argv[1] == "inside":
        inside()
        return
    top = sys.argv[1]
    for number, line in enumerate(sys.stdin):
        place = f"{top}/{number}"
        os.mkdir(place)
        answer = run(json.loads(base64.b64decode(line)), place)
        shutil.rmtree(place)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
