"""What this host gives a sandbox of this caller, found by trying it, with the command that mends what is missing.

Unlike ``probe``, which reads what a plan needs in microseconds, this takes a good part of a second and forks for each
attempt. Nothing that an attempt makes is left behind.
"""

from nsbox.doctor import cgroups, filesystems, host, identity, namespaces, network, security, surroundings
from nsbox.doctor.fact import Fact, newer_kernel
from nsbox.doctor.render import render, to_json, verdict

__all__ = ["Fact", "facts", "render", "to_json", "verdict"]


def _on_the_host(fact: Fact) -> Fact:
    """The kernel and its settings cannot be changed from within a container, and its distribution is another one's."""
    if fact.remedy and newer_kernel() in fact.remedy:
        return fact._replace(remedy="boot a newer kernel on the host, outside the container")
    if any(command in fact.remedy for command in ("sysctl -w", "modprobe", "swapoff", "/etc/default/grub")):
        return fact._replace(remedy=f"on the host, outside the container: {fact.remedy}")
    return fact


def facts() -> list[Fact]:
    """All facts, for the caller as it is now. To be called from a process without other threads."""
    spaces = namespaces.facts()
    usable = next(fact.ok for fact in spaces if fact.name == "user_namespaces")
    found = [
        *identity.facts(usable),
        *host.facts(),
        *surroundings.facts(),
        *spaces,
        *filesystems.facts(usable),
        *security.facts(),
        *cgroups.facts(),
        *network.facts(usable),
    ]
    return [_on_the_host(fact) for fact in found] if surroundings.container() else found
