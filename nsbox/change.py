"""One change that a payload made, and the set of all."""

from typing import Any, NamedTuple

ADDED, MODIFIED, DELETED = "added", "modified", "deleted"
TYPE_CHANGED, MODE_CHANGED = "type_changed", "mode_changed"


class Before(NamedTuple):
    """The host's file as the scan saw it, to notice later that it is another by now."""

    kind: str
    ino: int
    size: int
    mode: int
    mtime_ns: int
    ctime_ns: int


class Change(NamedTuple):
    """One path that is different. ``path`` is relative, with bytes that are not UTF-8 as surrogates."""

    path: str
    change: str
    kind: str  #: what it is now; of what was deleted, what it was
    bytes: int = 0
    mode: int = 0  #: permission bits
    sha256: str | None = None  #: None for what is no file, or was not read: ``note`` says why
    target: str | None = None  #: where a symbolic link leads
    linked_to: str | None = None  #: the first path of the same inode
    sparse: bool = False
    xattrs: tuple[str, ...] = ()
    uid: int = 0
    gid: int = 0
    trusted_by_host: str = ""  #: why the host would act upon it by itself, else empty
    secrets: tuple[str, ...] = ()  #: names of the values looked for that are inside
    before: Before | None = None
    note: str = ""

    def report(self) -> dict[str, Any]:
        """The fields that the report and the boundary log carry."""
        out: dict[str, Any] = {"path": self.path, "change": self.change, "kind": self.kind, "bytes": self.bytes}
        out |= {"sha256": self.sha256, "mode": f"{self.mode:04o}", "trusted_by_host": bool(self.trusted_by_host)}
        for name in ("target", "linked_to", "sparse", "xattrs", "secrets", "note"):
            value = getattr(self, name)
            if value:
                out[name] = list(value) if isinstance(value, tuple) else value
        return out


class ChangeSet(NamedTuple):
    """All changes, parents before what is in them. ``truncated`` says what was not looked at; empty when all was."""

    entries: tuple[Change, ...] = ()
    truncated: tuple[str, ...] = ()

    def trusted(self) -> tuple[Change, ...]:
        """Those that the host would act upon by itself."""
        return tuple(entry for entry in self.entries if entry.trusted_by_host)
