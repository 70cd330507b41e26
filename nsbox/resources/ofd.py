"""Open file description locks on single bytes of a file (fcntl_locking(2)).

Such a lock belongs to the open file, not to the process or a thread: it is gone when the last copy of its descriptor
is, even by SIGKILL, so nothing has to be cleaned up; and it costs one system call."""

import errno
import fcntl
import os
import struct

_FLOCK = struct.Struct("hhxxxxqqixxxx")  # l_type, l_whence, l_start, l_len, l_pid on 64-bit Linux


def open_file(path: str) -> int:
    """A descriptor of the lock file, made with mode 0600 where it is missing."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def lock(file: int, kind: int, byte: int, *, wait: bool = False) -> bool:
    """Set F_RDLCK, F_WRLCK or F_UNLCK on one byte. False when another open file holds it and ``wait`` is not set."""
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    try:
        fcntl.fcntl(file, command, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
