"""What this host gives a sandbox of this caller, found by trying it, with the command that mends what is missing.

Unlike ``probe``, which reads what a plan needs in microseconds, this takes a good part of a second and forks for each
attempt. Nothing that an attempt makes is left behind.
"""

from nsbox.doctor import cgroups, filesystems, host, namespaces, network, security
from nsbox.doctor.fact import Fact
from nsbox.doctor.render import render, to_json, verdict

__all__ = ["Fact", "facts", "render", "to_json", "verdict"]


def _on_the_host(fact: Fact) -> Fact:
    """Kernel settings and modules cannot be changed from within a container."""
    if any(command in fact.remedy for command in ("sysctl -w", "modprobe")):
        return fact._replace(remedy=f"on the host, outside the container: {fact.remedy}")
    return fact


def facts() -> list[Fact]:
    """All facts, for the caller as it is now. To be called from a process without other threads."""
    found = [*host.facts(), *namespaces.facts()]
    user_namespaces = next(fact.ok for fact in found if fact.name == "user_namespaces")
    found += [*filesystems.facts(user_namespaces), *security.facts(), *cgroups.facts(), *network.facts(user_namespaces)]
    return [_on_the_host(fact) for fact in found] if host.container() else found
