"""Snapshots as tar archives, to keep them or to carry them to another host.

``root/…`` is what was written beneath the root, ``workspace/…`` beneath the workspace, with owners as ids inside. What
was deleted is an empty file with the pax record NSBOX.whiteout, a directory that hides what is beneath it has
NSBOX.opaque. An archive need not be trusted: names lead nowhere but into the layer, devices and set-id bits do not.
"""

import os
import stat
import tarfile
from typing import BinaryIO

from nsbox import probe, tree
from nsbox.budget import Budget, Limited
from nsbox.errors import SpecError
from nsbox.resources import ids
from nsbox.snapshot import Layer, Snapshot
from nsbox.spec import Spec

_NAMES = {"root": "u0", "workspace": "u1"}
_WHITEOUT, _OPAQUE = "NSBOX.whiteout", "NSBOX.opaque"


def write(snapshot: Snapshot, stream: BinaryIO) -> None:
    """Write a snapshot, all its layers as one. Raises OSError."""
    privileged = probe.host().privileged
    layer = snapshot.layers[0]
    if len(snapshot.layers) > 1:
        layer = Layer(probe.host().state).fill([(each.fd, int if privileged else None) for each in snapshot.layers])
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for prefix, name in _NAMES.items():
            fd = os.open(name, tree.DIRECTORY, dir_fd=layer.fd)
            try:
                _Writer(archive, None if privileged else snapshot.spec.uid).directory(fd, prefix)
            finally:
                os.close(fd)


class _Writer:
    def __init__(self, archive: tarfile.TarFile, owner: int | None) -> None:
        self._archive, self._owner = archive, owner
        self._links: dict[tuple[int, int], str] = {}

    def directory(self, fd: int, path: str) -> None:
        lend = self._owner is not None
        for name in sorted(os.listdir(fd)):
            status = tree.look(fd, name)
            if status is None:
                continue
            info = self._info(f"{path}/{name}", status)
            if stat.S_ISDIR(status.st_mode):
                below = tree.open_directory(fd, name, lend=lend)
                try:
                    if tree.overlay_xattr(below, "opaque") == b"y":
                        info.pax_headers = {_OPAQUE: "y"}
                    info.type = tarfile.DIRTYPE
                    self._archive.addfile(info)
                    self.directory(below, f"{path}/{name}")
                finally:
                    tree.close(below)
            elif stat.S_ISREG(status.st_mode):
                self._file(fd, name, info, lend)
            else:
                self._other(fd, name, info, status)

    def _info(self, path: str, status: os.stat_result) -> tarfile.TarInfo:
        info = tarfile.TarInfo(path)
        info.mode, info.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
        info.uid = status.st_uid if self._owner is None else self._owner
        info.gid = status.st_gid if self._owner is None else self._owner
        return info

    def _file(self, at: int, name: str, info: tarfile.TarInfo, lend: bool) -> None:
        fd, status = tree.open_file(at, name, lend=lend)
        with os.fdopen(fd, "rb") as file:
            key = (status.st_dev, status.st_ino)
            if key in self._links:
                info.type, info.linkname = tarfile.LNKTYPE, self._links[key]
                self._archive.addfile(info)
                return
            if status.st_nlink > 1:
                self._links[key] = info.name
            info.size = status.st_size
            self._archive.addfile(info, file)

    def _other(self, at: int, name: str, info: tarfile.TarInfo, status: os.stat_result) -> None:
        if stat.S_ISLNK(status.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=at)
        elif stat.S_ISFIFO(status.st_mode):
            info.type = tarfile.FIFOTYPE
        else:
            info.pax_headers = {_WHITEOUT: "y"}
        self._archive.addfile(info)


def read(stream: BinaryIO, spec: Spec) -> Snapshot:
    """Read what ``write`` has written. Raises SpecError for what is no such archive, OSError."""
    host = probe.host()
    layer = Layer(host.state)
    for name in _NAMES.values():
        os.mkdir(name, 0o755, dir_fd=layer.fd)
    budget = Budget()
    try:
        with tarfile.open(fileobj=Limited(stream), mode="r|") as archive:  # type: ignore[call-overload]
            with tree.Walker(layer.fd, lend=not host.privileged) as walker:
                reader = _Reader(archive, walker, host.privileged)
                for info in archive:
                    budget.take(info.size)
                    reader.member(info)
            reader.finish(layer.fd)
    except (
        tarfile.TarError,
        ValueError,
        OverflowError,
        FileNotFoundError,
        FileExistsError,
        NotADirectoryError,
    ) as error:
        raise SpecError(f"snapshot: the archive is not one of nsbox: {error}") from None
    return Snapshot(spec, (layer,))


class _Reader:
    def __init__(self, archive: tarfile.TarFile, walker: tree.Walker, privileged: bool) -> None:
        self._archive, self._walker, self._privileged = archive, walker, privileged
        self._modes: list[tuple[tuple[str, ...], str, int]] = []

    def member(self, info: tarfile.TarInfo) -> None:
        (top, *parents), name = tree.split(info.name.rstrip("/"))
        path = (_NAMES[top], *parents) if top in _NAMES else ()
        if not path or not (0 <= info.uid < ids.SIZE and 0 <= info.gid < ids.SIZE):
            raise ValueError(f"{info.name!r}, {info.uid}:{info.gid}")
        at = self._walker.directory(path)
        if info.isdir():
            os.mkdir(name, 0o700, dir_fd=at)
            self._modes.append((path, name, info.mode & 0o3777))
            if info.pax_headers.get(_OPAQUE):
                fd = tree.open_directory(at, name)
                try:
                    os.setxattr(fd, "user.overlay.opaque", b"y")
                finally:
                    os.close(fd)
        elif info.pax_headers.get(_WHITEOUT):
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=at)
        elif info.isfile():
            self._file(at, name, info)
        elif info.issym():
            os.symlink(info.linkname, name, dir_fd=at)
        elif info.isfifo():
            os.mkfifo(name, 0o600, dir_fd=at)
            os.chmod(name, info.mode & 0o777, dir_fd=at)
        elif info.islnk():
            self._link(path, name, info)
            return
        else:
            raise ValueError(f"{info.name!r} is a special file")
        if self._privileged:
            os.chown(name, info.uid, info.gid, dir_fd=at, follow_symlinks=False)
        os.utime(name, (info.mtime, info.mtime), dir_fd=at, follow_symlinks=False)

    def _file(self, at: int, name: str, info: tarfile.TarInfo) -> None:
        content = self._archive.extractfile(info)
        assert content is not None
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
        with os.fdopen(fd, "wb") as file:
            while data := content.read(tree.CHUNK):
                file.write(data)
            os.fchmod(fd, info.mode & 0o1777)

    def _link(self, path: tuple[str, ...], name: str, info: tarfile.TarInfo) -> None:
        (top, *parents), other = tree.split(info.linkname)
        source = os.dup(self._walker.directory((_NAMES[top], *parents)))
        try:
            if not stat.S_ISREG(os.stat(other, dir_fd=source, follow_symlinks=False).st_mode):
                raise ValueError(f"{info.name!r} is a link to no file")
            at = self._walker.directory(path)
            os.link(other, name, src_dir_fd=source, dst_dir_fd=at, follow_symlinks=False)
        finally:
            os.close(source)

    def finish(self, top: int) -> None:
        """Directories get their modes last: one may forbid to fill it."""
        with tree.Walker(top, lend=not self._privileged) as walker:
            for path, name, mode in reversed(self._modes):
                fd = tree.open_directory(walker.directory(path), name)
                try:
                    os.fchmod(fd, mode)
                finally:
                    os.close(fd)
