"""_enter.py USER NET RESOLV_CONF COMMAND...: becomes the command in the namespaces that two descriptors lead to.

A program of its own: what it calls is not safe in the child of a process with threads. Without RESOLV_CONF (``-``) the
command keeps the capabilities over these namespaces; with it there is a mount namespace too, and not one capability.
"""

import ctypes
import os
import sys

CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWNS = 0x10000000, 0x40000000, 0x00020000
MS_BIND = 0x1000
PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 24, 28, 38
_libc = ctypes.CDLL(None, use_errno=True)


def call(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    call(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    call(_libc.setns(fd, kind), "setns")


def main(user: str, net: str, resolv_conf: str, *command: str) -> None:
    for fd, kind in ((int(user), CLONE_NEWUSER), (int(net), CLONE_NEWNET)):
        setns(fd, kind)
        os.close(fd)
    if resolv_conf != "-":
        unshare(CLONE_NEWNS)
        call(_libc.mount(resolv_conf.encode(), b"/etc/resolv.conf", None, MS_BIND, None), "bind resolv.conf")
        # Root in there would keep its capabilities over execve(2): drop the bounding set and forbid it.
        for capability in range(64):
            _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        _libc.prctl(PR_SET_SECUREBITS, 0x2F, 0, 0, 0)  # SECBIT_NOROOT and its lock, among others
        _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
