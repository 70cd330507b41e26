"""The small operations that a root file system is built of, as data. ``native/mounts.c`` plays them in order."""

from __future__ import annotations

from nsbox.light import NamedTuple

# The numbers are those of native/nsbox.h; tests/native compares them with what the compiled module says.
KINDS = (
    "lower",
    "overlay",
    "bind",
    "tmpfs",
    "secrets",
    "scratch",
    "proc",
    "dev",
    "mask",
    "upper",
)
READ_ONLY, NO_EXEC, RECURSIVE, IDMAP_RANGE, IDMAP_OWNER, DIRECTORY = 1, 2, 4, 8, 16, 32

#: stands for the made-up part of the root, which is prepared on disk before the launch
SKELETON = "\0skeleton"


def _proc(name: str) -> str:
    return name if name.startswith("/") else f"/proc/{name}"


class Op(NamedTuple):
    """One operation; which fields count depends on the kind."""

    kind: str
    dst: str = ""
    src: str = ""
    data: str = ""
    flags: int = 0
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    size: int = 0
    inodes: int = 0

    def describe(self) -> str:
        """The operation in words, as ``-v`` and errors show it."""
        source = "the prepared skeleton" if self.src == SKELETON else self.src
        access = "read-only" if self.flags & READ_ONLY else "read-write"
        return {
            "lower": f"layer {source}",
            "overlay": f"overlay of {self.data} on {self.dst or '/'}",
            "bind": f"{source} on {self.dst}, {access}",
            "tmpfs": f"tmpfs of {self.size} bytes on {self.dst}",
            "secrets": f"secrets on {self.dst}, read-only",
            "scratch": f"scratch directory on {self.dst}",
            "proc": f"proc on {self.dst}",
            "dev": f"devices on {self.dst}",
            "mask": f"{_proc(self.dst)} {'read-only' if self.flags & READ_ONLY else 'masked'}",
            "upper": f"directory {self.dst} in the upper layer",
        }[self.kind]
