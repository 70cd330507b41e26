"""What is left of processes that were killed: found by the mark of its owner, and removed.

Processes, mounts, network namespaces and their links need none of it: they end with the owner, however that ends.
Nothing of a living owner is ever touched.
"""

import os
import time

from nsbox.resources import cgroup, scratch, skeleton

EVERY_S = 10.0  #: how often the processes of one caller sweep by themselves, all together


def sweep_in_turn(state: str) -> None:
    """The same as ``sweep``, unless a process of this caller has done it just now: what many short ones would look at
    again and again is the same. Never raises."""
    path = os.path.join(state, "swept")
    try:
        if 0 <= time.time() - os.lstat(path).st_mtime < EVERY_S:
            return
    except OSError:
        pass  # nobody has yet
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.utime(fd)
        finally:
            os.close(fd)
    except OSError:
        pass  # then the next one does it as well
    sweep(state)


def sweep(state: str) -> list[str]:
    """Remove cgroups, scratch directories and half-made skeletons of dead owners, and skeletons that nobody has used
    for a day, as far as the records in ``state`` tell; one line for each. Never raises."""
    lines = cgroup.sweep(state) + scratch.sweep(state)
    try:
        return lines + [f"skeleton {path}: nobody uses it, removed" for path in skeleton.collect(state)]
    except OSError as error:
        return [*lines, f"skeletons in {state} cannot be looked at: {error.strerror}"]
