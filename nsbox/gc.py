"""``nsbox gc``: remove what killed processes have left, now, and say what it was.

Every process does the same by itself after its first sandbox; this is for hosts on which none may follow.
"""

from nsbox import probe
from nsbox.resources.sweep import sweep


def collect() -> list[str]:
    """One line for each thing that was removed, or could not be. Raises SandboxUnavailable."""
    return sweep(probe.host().state)
