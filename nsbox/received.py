"""Descriptors that come from inside, looked at before they are used: whoever has taken over a sandbox's init or a
watcher may hand over anything that it has, and what a read, a write or an ioctl does depends on what it is done to."""

from __future__ import annotations

import os
import stat

from nsbox._native import lib
from nsbox.errors import SandboxUnavailable
from nsbox.light import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsbox.plan.net import SocketSpec
    from nsbox.resources.scratch import Scratch

TMPFS, RAMFS = 0x01021994, 0x858458F6  # statfs(2)
_PTMX = os.makedev(5, 2)
_TIOCGPTN = 0x80045430  # ioctl_tty(2); the same number on all processors that nsbox knows
_SO_NETNS_COOKIE = 71  # Linux 5.14
_NETLINK_ROUTE, _NETLINK_NETFILTER = 0, 12


def wrong(what: str) -> SandboxUnavailable:
    """The error for a descriptor that is not what it should be."""
    return SandboxUnavailable(f"the sandbox handed over something else in place of {what}", remedy="start another")


def directory(fd: int, what: str, *, filesystem: int | None = None, same: int | None = None) -> None:
    """A directory; on a file system of that kind (statfs(2)), or the ``same`` that another descriptor holds. Raises
    SandboxUnavailable."""
    status = os.fstat(fd)
    good = stat.S_ISDIR(status.st_mode)
    if filesystem is not None:
        good = good and lib.nsb_fs_type(fd) == filesystem
    if same is not None:
        good = good and os.path.samestat(status, os.fstat(same))
    if not good:
        raise wrong(what)


def at_start(fds: dict[str, int], scratch: Scratch | None, tty: bool) -> None:
    """What comes with NSB_MSG_STARTED, by name; with ``tty`` stdout is a terminal's master. Raises SandboxUnavailable
    for one that is not what its name says."""
    if "root_fd" in fds:
        directory(fds["root_fd"], "its root")
        if scratch is not None:
            directory(fds["scratch_fd"], "its scratch directory", same=scratch.fd)
        else:
            directory(fds["scratch_fd"], "its scratch file system", filesystem=TMPFS)
    if "secrets_fd" in fds:
        directory(fds["secrets_fd"], "its secrets", filesystem=RAMFS)
    if tty:
        terminal(fds["stdout"])


def terminal(fd: int) -> None:
    """The master of a pseudo-terminal. Raises SandboxUnavailable."""
    import fcntl

    status = os.fstat(fd)
    try:
        good = stat.S_ISCHR(status.st_mode) and status.st_rdev == _PTMX
        if good:
            fcntl.ioctl(fd, _TIOCGPTN, bytes(4))
            good = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    except OSError:  # opened with O_PATH
        good = False
    if not good:
        raise wrong("the terminal")


def network(fds: Sequence[int], sockets: Sequence[SocketSpec]) -> None:
    """The sockets of NSB_MSG_NETWORK: two of netlink, then those of the plan, all of one network namespace that is not
    ours. Raises SandboxUnavailable."""
    import socket

    wanted: list[tuple[int, int, int, int]]
    wanted = [(socket.AF_NETLINK, socket.SOCK_RAW, protocol, 0) for protocol in (_NETLINK_ROUTE, _NETLINK_NETFILTER)]
    wanted += [(one.family, one.type, one.protocol, one.backlog) for one in sockets]
    cookies = {namespace(fd) for fd in fds} if all(map(_is_socket, fds)) else {None, 0}
    same = len(fds) == len(wanted) and len(cookies) == 1
    if not same or (None not in cookies and own_namespace() in cookies) or not all(map(_is, fds, wanted)):
        raise wrong("its network's sockets")


def _is_socket(fd: int) -> bool:
    return stat.S_ISSOCK(os.fstat(fd).st_mode)


def _is(fd: int, wanted: tuple[int, int, int, int]) -> bool:
    import socket

    family, kind, protocol, backlog = wanted
    options = [(socket.SO_DOMAIN, family), (socket.SO_TYPE, kind & 0xF), (socket.SO_ACCEPTCONN, int(backlog > 0))]
    with socket.socket(fileno=os.dup(fd)) as sock:
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
        # 0 stands for the usual one of a family and kind.
        return (found == protocol or (not protocol and family != socket.AF_NETLINK)) and all(
            sock.getsockopt(socket.SOL_SOCKET, name) == value for name, value in options
        )


def namespace(fd: int) -> int | None:
    """What is the same for all sockets of a network namespace; None where the kernel does not tell. Raises OSError for
    what is no socket."""
    import socket

    with socket.socket(fileno=os.dup(fd)) as sock:
        try:
            return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8), "little")
        except OSError:
            return None


def own_namespace() -> int | None:
    """The same for the calling process's own."""
    import socket

    with socket.socket(socket.AF_UNIX) as sock:
        return namespace(sock.fileno())


def connection(fd: int, *, own: bool) -> None:
    """A TCP socket that was made inside: not in our network, unless the sandbox has it as its ``own``. Raises
    SandboxUnavailable."""
    import socket

    good = _is_socket(fd) and _is(fd, (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, 0))
    if good and not own:
        cookie = namespace(fd)
        good = cookie is None or cookie != own_namespace()
    if not good:
        raise wrong("a connection")
