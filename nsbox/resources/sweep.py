"""What is left of processes that were killed: found by the mark of its owner, and removed.

Processes, mounts, network namespaces and their links need none of it: they end with the owner, however that ends.
Nothing of a living owner is ever touched.
"""

from nsbox.resources import cgroup, scratch, skeleton


def sweep(state: str) -> list[str]:
    """Remove cgroups, scratch directories and half-made skeletons of dead owners, and skeletons that nobody has used
    for a day, as far as the records in ``state`` tell; one line for each. Never raises."""
    lines = cgroup.sweep(state) + scratch.sweep(state)
    try:
        return lines + [f"skeleton {path}: nobody uses it, removed" for path in skeleton.collect(state)]
    except OSError as error:
        return [*lines, f"skeletons in {state} cannot be looked at: {error.strerror}"]
