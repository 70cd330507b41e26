"""Takes changes out of a sandbox: ``export`` into a directory of their own, ``apply`` back into the workspace.

Both read and write by directory descriptors only (see ``nsbox.tree``): nothing that the payload planted, on either
side, is followed. What the host would act upon by itself is held back unless it is allowed by name.
"""

import os
import stat
from collections.abc import Callable, Collection

from nsbox import copying, tree
from nsbox.change import ADDED, DELETED, MODE_CHANGED, Change, ChangeSet
from nsbox.errors import SpecError
from nsbox.outgoing import Allowed, Applied, Caps, Conflict, Exported, Held, Job, is_allowed, listed

__all__ = ["Applied", "Caps", "Exported", "Held", "apply", "export", "is_allowed"]


def export(
    changes: ChangeSet,
    upper_fd: int,
    dest_dir: str,
    *,
    allow_trusted: Allowed = (),
    caps: Caps = Caps(),  # noqa: B008 - immutable
) -> Exported:
    """Copy what was added or changed into ``dest_dir``, which must be new or empty.

    Raises SpecError when it is not, OSError when it cannot be written at all; a single file that cannot be copied is
    among the skipped.
    """
    try:
        os.makedirs(dest_dir, exist_ok=True)
        # Not through a link: a payload with a writable mount could have put one there.
        dest = os.open(dest_dir.rstrip("/") or "/", tree.DIRECTORY)
    except (FileExistsError, NotADirectoryError):
        raise SpecError(f"export: {dest_dir!r} is not a directory; name a new or empty one, no link to one") from None
    try:
        if tree.names(dest, 1)[0]:
            raise SpecError(f"export: {dest_dir!r} is not empty; name a new or empty directory")
        with tree.Walker(upper_fd, lend=True) as source, tree.Walker(dest, make=0o755) as target:
            return _Export(source, target, allow_trusted, caps).all(changes)
    finally:
        os.close(dest)


class _Export(Job):
    def all(self, changes: ChangeSet) -> Exported:
        for entry in changes.entries:
            if entry.change != DELETED:
                self.take(entry, self.one)
        manifest = tuple(entry.report() for entry in changes.entries)
        return Exported(tuple(self.done), tuple(self.held_back), tuple(self.skipped), manifest)

    def one(self, entry: Change) -> None:
        parents, name = tree.split(entry.path)
        if entry.kind == "dir":
            self.target.directory((*parents, name))
            copying.change_mode(self.target.directory(parents), name, entry.mode)
        elif entry.kind in ("file", "symlink"):
            if entry.kind == "symlink":
                self.checked_target(entry, entry.target or "")  # before a directory is made for it
            self.copy(entry, self.target.directory(parents), name)
        else:
            raise ValueError(f"a {entry.kind} is only listed, never made")


def apply(
    changes: ChangeSet,
    upper_fd: int,
    workspace_dir: str,
    *,
    paths: Collection[str] | None = None,
    force: bool = False,
    allow_trusted: Allowed = (),
    since_ns: int | None = None,
    caps: Caps = Caps(),  # noqa: B008 - immutable
) -> Applied:
    """Write changes back into the workspace; each file is replaced in one step, by rename(2).

    ``paths`` picks changes by path or directory. A file that is not the one that the scan saw, or (``since_ns``, the
    wall-clock time of the launch in nanoseconds) that the host changed after the launch, is a conflict and left alone
    unless ``force``. Raises SpecError for a change set that is not complete, unless ``paths`` or ``force`` is given,
    and OSError when the workspace cannot be opened.
    """
    if changes.truncated and paths is None and not force:
        why = changes.truncated[0]
        raise SpecError(f"apply: not everything that changed is known ({why}); name the paths to apply, or force it")
    root = os.open(workspace_dir, tree.DIRECTORY)
    try:
        with tree.Walker(upper_fd, lend=True) as source, tree.Walker(root, make=0o755) as target:
            job = _Apply(source, target, allow_trusted, caps)
            job.force, job.since_ns = force, since_ns
            return job.all([entry for entry in changes.entries if paths is None or listed(entry.path, paths)])
    finally:
        os.close(root)


class _Apply(Job):
    force = False
    since_ns: int | None = None

    def all(self, entries: list[Change]) -> Applied:
        # What is inside of a directory goes before it, and what takes its place comes after.
        for entry in reversed(entries):
            if entry.change == DELETED:
                self.take(entry, self.guarded(self.remove))
        for entry in entries:
            if entry.change != DELETED:
                self.take(entry, self.guarded(self.put))
        return Applied(tuple(self.done), tuple(self.held_back), tuple(self.conflicts), tuple(self.skipped))

    def guarded(self, act: "Callable[[Change, int, str, os.stat_result | None], None]") -> Callable[[Change], None]:
        """``act`` behind the check that the host's file is still the one that the payload started from."""

        def checked(entry: Change) -> None:
            parents, name = tree.split(entry.path)
            # Directories that were there and are gone were removed by the host, on purpose.
            self.target.make = 0o755 if entry.before is None else None
            try:
                at = self.target.directory(parents)
            except (NotADirectoryError, FileNotFoundError, FileExistsError) as error:
                raise Conflict(f"the host has replaced a directory above it meanwhile: {error.strerror}") from None
            now = tree.look(at, name)
            why = "" if self.force else self.conflict(entry, now)
            if why:
                raise Conflict(why)
            act(entry, at, name, now)

        return checked

    def conflict(self, entry: Change, now: os.stat_result | None) -> str:
        """Why the host's file is not what the payload started from; empty when it is."""
        before = entry.before
        if before is None:
            there = now is not None and not (entry.kind == "dir" and stat.S_ISDIR(now.st_mode))
            return "the host has made one of that name meanwhile" if there else ""
        if now is None:
            return "the host has removed it meanwhile"
        if tree.kind_of(now.st_mode) != before.kind:
            return "the host has put something else there meanwhile"
        if before.kind == "dir":  # its time stamps change with whatever is in it
            return ""
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (before.ino, before.size, before.mtime_ns):
            return "the host has changed it since the changes were looked at"
        # A change of the inode cannot be back-dated, as one of the content can.
        if self.since_ns is not None and before.ctime_ns > self.since_ns:
            return "the host has changed it since the sandbox was started"
        return ""

    def remove(self, entry: Change, at: int, name: str, now: os.stat_result | None) -> None:
        if now is None:
            return
        if stat.S_ISDIR(now.st_mode):
            try:
                os.rmdir(name, dir_fd=at)
            except OSError:
                raise Conflict("the host has put something into it meanwhile") from None
        else:
            os.unlink(name, dir_fd=at)

    def put(self, entry: Change, at: int, name: str, now: os.stat_result | None) -> None:
        if entry.kind == "dir":
            self.put_directory(entry, at, name, now)
        elif entry.kind not in ("file", "symlink"):
            raise ValueError(f"a {entry.kind} is only listed, never made")
        elif entry.change == MODE_CHANGED and now is not None and now.st_nlink == 1:
            # A file with other names, perhaps outside of the workspace, is replaced: they would change with it.
            copying.change_mode(at, name, entry.mode)
        else:
            self.replace(entry, at, name, now)

    def put_directory(self, entry: Change, at: int, name: str, now: os.stat_result | None) -> None:
        if now is not None and not stat.S_ISDIR(now.st_mode):
            os.unlink(name, dir_fd=at)
            now = None
        if now is None:
            os.mkdir(name, 0o700, dir_fd=at)
            copying.give_to(at, name, os.fstat(at))
        if now is None or entry.change != ADDED:
            copying.change_mode(at, name, entry.mode)

    def replace(self, entry: Change, at: int, name: str, now: os.stat_result | None) -> None:
        """A file or link under its name in one step: nobody ever sees half of it."""
        temporary = copying.temporary_name()
        self.copy(entry, at, temporary)
        try:
            copying.give_to(at, temporary, now or os.fstat(at))
            if now is not None and stat.S_ISDIR(now.st_mode):
                self.remove(entry, at, name, now)
            os.rename(temporary, name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            os.unlink(temporary, dir_fd=at)
            raise
