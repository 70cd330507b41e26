"""What a fact is, and the words that several of them share."""

import os
import shlex
from typing import NamedTuple

#: Package managers by the words of ID and ID_LIKE in os-release(5).
_MANAGERS = {
    "debian": "apt-get install",
    "ubuntu": "apt-get install",
    "fedora": "dnf install",
    "rhel": "dnf install",
    "centos": "dnf install",
    "suse": "zypper install",
    "opensuse": "zypper install",
    "arch": "pacman -S",
    "alpine": "apk add",
}
_PACKAGES = {
    "libseccomp": {"apt-get": "libseccomp2", "zypper": "libseccomp2"},
    "uidmap": {"dnf": "shadow-utils", "apk": "shadow-subids", "zypper": "shadow", "pacman": "shadow"},
}
_KERNELS = {
    "dnf install": "dnf upgrade kernel",
    "zypper install": "zypper update kernel-default",
    "pacman -S": "pacman -Syu linux",
    "apk add": "apk upgrade linux-lts",
}
SYSCTL_FILE = "/etc/sysctl.d/60-nsbox.conf"


class Fact(NamedTuple):
    """One thing that a host gives or does not give, as this caller sees it."""

    name: str
    ok: bool
    value: str | int | bool
    reason: str = ""  #: why it is not ok
    remedy: str = ""  #: the command that mends it
    needed: bool = False  #: no sandbox can be had without it


def read(path: str, limit: int = 1 << 20) -> str:
    """The text of a file of the kernel or of /etc; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(limit)
    except OSError:
        return ""


def number(text: str) -> int | None:
    """The number that a file holds, or None."""
    text = text.strip()
    return int(text) if text.lstrip("-").isdigit() else None


def as_root(command: str, argument: str = "") -> str:
    """The command as this caller has to type it; ``argument`` is expanded by the caller's own shell and $0 inside."""
    if os.geteuid() == 0 and not argument:
        return command
    words = f"sh -c {shlex.quote(command)} {argument}".rstrip()
    return words if os.geteuid() == 0 else f"sudo {words}"


def sysctl(name: str, value: int | str) -> str:
    """The command that sets a sysctl now and after the next boot."""
    return as_root(f"sysctl -w {name}={value} && echo {name}={value} >> {SYSCTL_FILE}")


def os_release_fields(text: str) -> dict[str, str]:
    """The assignments of os-release(5) without their quotes."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name: value.strip().strip("\"'") for name, _, value in pairs}


def package_manager(os_release: str) -> str:
    """The install command of the distribution that an os-release(5) describes; apt-get where it is unknown."""
    fields = os_release_fields(os_release)
    words = f"{fields.get('ID', '')} {fields.get('ID_LIKE', '')}".split()
    return next((_MANAGERS[part] for word in words for part in (word, word.split("-")[0]) if part in _MANAGERS),
                "apt-get install")  # fmt: skip


def install(what: str) -> str:
    """The command that installs a thing by this distribution's name for it."""
    command = package_manager(read("/etc/os-release"))
    return as_root(f"{command} {_PACKAGES[what].get(command.split()[0], what)}")


def newest_kernel(os_release: str, machine: str) -> str:
    """The command that installs the newest kernel that a release of a distribution has."""
    command = package_manager(os_release)
    if command in _KERNELS:
        return _KERNELS[command]
    fields = os_release_fields(os_release)
    if fields.get("ID") == "ubuntu" and fields.get("VERSION_ID"):
        return f"apt-get install linux-generic-hwe-{fields['VERSION_ID']}"
    image = f"linux-image-{'arm64' if machine == 'aarch64' else 'amd64'}"
    if fields.get("ID") != "debian" or not fields.get("VERSION_CODENAME"):
        return f"apt-get install {image}"
    suite = f"{fields['VERSION_CODENAME']}-backports"
    source = f"echo deb http://deb.debian.org/debian {suite} main > /etc/apt/sources.list.d/backports.list"
    return f"{source} && apt-get update && apt-get install -t {suite} {image}"


def newer_kernel() -> str:
    """``newest_kernel`` for this host, as this caller has to type it."""
    return as_root(newest_kernel(read("/etc/os-release"), os.uname().machine)) + ", then reboot"
