"""What a payload changed: the upper directory of an overlay, read against the directory beneath it → a change set.

Works on descriptors of directories only (see ``nsbox.tree``), so that a payload that still runs can spoil what is
reported but lead nowhere. What overlayfs copied up without a change is not a change. The marks that it leaves are those
of Documentation/filesystems/overlayfs.rst: a character device 0:0 or an empty file with an attribute for what was
deleted, an attribute on a directory whose lower content is hidden.
"""

import os
import stat
from collections.abc import Callable, Mapping

from nsbox import tree
from nsbox.change import ADDED, DELETED, MODE_CHANGED, MODIFIED, TYPE_CHANGED, Before, Change, ChangeSet
from nsbox.contents import read
from nsbox.trust import MAX_PARSED, Trust, changed_key, trust

__all__ = ["ADDED", "DELETED", "MODE_CHANGED", "MODIFIED", "TYPE_CHANGED", "Change", "ChangeSet", "scan"]

MAX_ENTRIES, MAX_BYTES = 100_000, 1 << 30


def scan(
    upper_fd: int,
    lower_path: str | None,
    *,
    hash: bool = True,
    max_entries: int = MAX_ENTRIES,
    max_bytes: int = MAX_BYTES,
    map_ids: Callable[[int], int] | None = None,
    look_for: Mapping[str, bytes] | None = None,
    table: Trust | None = None,
) -> ChangeSet:
    """Compare an upper directory with the one beneath (None: nothing is).

    ``max_bytes`` bounds what is read for hashing and comparing, in total; a file beyond it counts as modified and has
    no hash. ``map_ids`` turns a host id into the one inside. ``look_for`` are values by name that should be in no file.
    Raises OSError when the directories themselves cannot be read.
    """
    lower = -1
    if lower_path is not None:
        # The caller's own directory, canonical since the launch.
        lower = os.open(lower_path, tree.DIRECTORY)
    try:
        job = _Scan(hash, max_entries, max_bytes, map_ids or int, dict(look_for or {}), table or trust())
        job.blind = lower_path is None
        job.directory(upper_fd, lower, "", 0)
    finally:
        if lower >= 0:
            os.close(lower)
    job.entries.sort(key=lambda entry: entry.path.split("/"))
    return ChangeSet(tuple(job.entries), tuple(sorted(job.truncated)))


def _before(status: os.stat_result) -> Before:
    """What is kept of the host's file."""
    kind = tree.kind_of(status.st_mode)
    mode = stat.S_IMODE(status.st_mode)
    return Before(kind, status.st_ino, status.st_size, mode, status.st_mtime_ns, status.st_ctime_ns)


class _Scan:
    def __init__(
        self,
        hashing: bool,
        max_entries: int,
        max_bytes: int,
        map_ids: Callable[[int], int],
        look_for: dict[str, bytes],
        table: Trust,
    ) -> None:
        self.hashing, self.max_entries, self.bytes_left = hashing, max_entries, max_bytes
        self.map_ids, self.look_for, self.table = map_ids, look_for, table
        self.entries: list[Change] = []
        self.truncated: set[str] = set()
        self.blind = False  #: nobody knows what was beneath
        self.links: dict[tuple[int, int], Change] = {}

    def full(self) -> bool:
        if len(self.entries) < self.max_entries:
            return False
        self.truncated.add(f"more than {self.max_entries} changes")
        return True

    def directory(self, upper: int, lower: int, prefix: str, depth: int) -> None:
        """Compare one directory; ``lower`` is -1 where there is none beneath it."""
        if depth > tree.MAX_DEPTH:
            self.truncated.add(f"directories deeper than {tree.MAX_DEPTH}")
            return
        names, complete = tree.names(upper, self.max_entries + 1)
        if not complete:
            self.truncated.add(f"more than {self.max_entries} changes")
        opaque = tree.overlay_xattr(upper, "opaque")
        for name in names:
            if self.full():
                return
            self.entry(upper, lower, name, prefix + name, depth, marked_empty=opaque == b"x")
        if opaque == b"y" and lower >= 0:
            kept = set(names)
            for name in tree.names(lower, self.max_entries)[0]:
                if name not in kept and not self.full():
                    self.gone(lower, name, prefix + name, depth)

    def entry(self, upper: int, lower: int, name: str, path: str, depth: int, *, marked_empty: bool) -> None:
        status = tree.look(upper, name)
        if status is None:  # the payload still runs, and has just removed it
            return
        old = tree.look(lower, name) if lower >= 0 else None
        if _is_whiteout(upper, name, status, marked_empty):
            if self.blind:
                self.add(Change(path, DELETED, "unknown"))
            elif old is not None:
                self.gone(lower, name, path, depth)
            return
        kind = tree.kind_of(status.st_mode)
        found = Change(
            path,
            ADDED,
            kind,
            bytes=status.st_size if kind in ("file", "symlink") else 0,
            mode=stat.S_IMODE(status.st_mode),
            uid=self.map_ids(status.st_uid),
            gid=self.map_ids(status.st_gid),
        )
        before = None if old is None else _before(old)
        same_kind = before is not None and before.kind == kind
        if before is not None:
            # Until something is found to differ the bits alone may have changed; empty stands for no change.
            bits = MODE_CHANGED if before.mode != found.mode and kind != "symlink" else ""
            found = found._replace(change=bits if same_kind else TYPE_CHANGED, before=before)
            if before.kind == "dir" and not same_kind:
                self.gone_inside(lower, name, path, depth)
        try:
            self.compare(upper, lower if same_kind else -1, name, found, status, depth)
        except OSError as error:
            self.add(found._replace(change=found.change or MODIFIED, note=f"unreadable: {error.strerror}"))

    def compare(self, upper: int, lower: int, name: str, found: Change, status: os.stat_result, depth: int) -> None:
        if found.kind == "dir":
            self.into(upper, lower, name, found, depth)
        elif found.kind == "file":
            self.file(upper, lower, name, found, status)
        elif found.kind == "symlink":
            target = os.readlink(name, dir_fd=upper)
            same = lower >= 0 and os.readlink(name, dir_fd=lower) == target
            self.add(found._replace(target=target, change=found.change or ("" if same else MODIFIED)))
        else:
            self.add(found)

    def into(self, upper: int, lower: int, name: str, found: Change, depth: int) -> None:
        inner = tree.open_directory(upper, name, lend=True)
        below = -1
        try:
            xattrs = tree.user_xattrs(inner)
            if lower >= 0:
                below = tree.open_directory(lower, name)
                if not found.change and tree.user_xattrs(below) != xattrs:
                    found = found._replace(change=MODIFIED)
            self.add(found._replace(xattrs=tuple(sorted(xattrs))))
            self.directory(inner, below, found.path + "/", depth + 1)
        finally:
            tree.close(inner)
            if below >= 0:
                os.close(below)

    def file(self, upper: int, lower: int, name: str, found: Change, status: os.stat_result) -> None:
        first = self.links.get((status.st_dev, status.st_ino)) if status.st_nlink > 1 else None
        fd, status = tree.open_file(upper, name, lend=True)
        old = -1
        try:
            if lower >= 0:
                old = tree.open_file(lower, name)[0]
            xattrs = tree.user_xattrs(fd)
            found = found._replace(
                bytes=status.st_size,
                xattrs=tuple(sorted(xattrs)),
                sparse=status.st_blocks * 512 < status.st_size,
                linked_to=first.path if first else None,
            )
            if old >= 0 and tree.user_xattrs(old) != xattrs:
                found = found._replace(change=MODIFIED)
            found = self.content(fd, old, found, first)
            found = self.keys(fd, old, found)
        finally:
            os.close(fd)
            if old >= 0:
                os.close(old)
        self.add(found)
        if status.st_nlink > 1 and first is None:
            self.links[status.st_dev, status.st_ino] = found

    def content(self, fd: int, old: int, found: Change, first: Change | None) -> Change:
        """Hash a file, compare it with the one beneath, look for values in it: all in one pass."""
        same_size = old >= 0 and os.fstat(old).st_size == found.bytes
        differs = old >= 0 and not same_size
        if first is not None and first.sha256 and not same_size:
            found = found._replace(sha256=first.sha256, secrets=first.secrets)
        elif self.hashing or same_size or self.look_for:
            if found.bytes > self.bytes_left:
                self.truncated.add("contents beyond the bytes that may be read")
                return found._replace(change=MODIFIED if old >= 0 else found.change, note="too large to be read")
            self.bytes_left -= found.bytes
            digest, secrets, same = read(fd, old if same_size else -1, self.look_for)
            differs = differs or not same
            found = found._replace(sha256=digest if self.hashing else None, secrets=secrets)
        return found._replace(change=MODIFIED) if differs else found

    def keys(self, fd: int, old: int, found: Change) -> Change:
        """Mark a file of which only some keys matter."""
        keys = self.table.keys_of(found.path)
        if not keys or not found.change:
            return found
        os.lseek(fd, 0, os.SEEK_SET)
        before = None
        if old >= 0:
            os.lseek(old, 0, os.SEEK_SET)
            before = tree.exactly(old, MAX_PARSED + 1)
        return found._replace(trusted_by_host=changed_key(found.path, keys, before, tree.exactly(fd, MAX_PARSED + 1)))

    def gone(self, lower: int, name: str, path: str, depth: int) -> None:
        """Report what was beneath as deleted, with everything in it."""
        status = tree.look(lower, name)
        if status is None:
            return
        before = _before(status)
        size = before.size if before.kind in ("file", "symlink") else 0
        self.add(Change(path, DELETED, before.kind, bytes=size, mode=before.mode, before=before))
        if before.kind == "dir":
            self.gone_inside(lower, name, path, depth)

    def gone_inside(self, lower: int, name: str, path: str, depth: int) -> None:
        if depth >= tree.MAX_DEPTH:
            self.truncated.add(f"directories deeper than {tree.MAX_DEPTH}")
            return
        try:
            inner = tree.open_directory(lower, name)
        except OSError:
            self.truncated.add("directories of the host that cannot be read")
            return
        try:
            for child in tree.names(inner, self.max_entries)[0]:
                if self.full():
                    return
                self.gone(inner, child, f"{path}/{child}", depth + 1)
        finally:
            os.close(inner)

    def add(self, found: Change) -> None:
        if found.change:
            why = found.trusted_by_host or self.table.why(found.path, found.kind)
            self.entries.append(found._replace(trusted_by_host=why))


def _is_whiteout(upper: int, name: str, status: os.stat_result, marked_empty: bool) -> bool:
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0
    if not marked_empty or not stat.S_ISREG(status.st_mode) or status.st_size:
        return False
    try:
        fd, _ = tree.open_file(upper, name)
    except OSError:
        return False
    try:
        return tree.overlay_xattr(fd, "whiteout") is not None
    finally:
        os.close(fd)
