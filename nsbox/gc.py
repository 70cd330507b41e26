"""``nsbox gc``: remove what killed processes have left, now, and say what it was.

Processes do the same by themselves after their first sandbox, once in ten seconds all together; this is for hosts on
which none may follow, and for those who will not wait.
"""

from nsbox import probe
from nsbox.resources.sweep import sweep


def collect() -> list[str]:
    """One line for each thing that was removed, or could not be. Raises SandboxUnavailable."""
    return sweep(probe.host().state)
