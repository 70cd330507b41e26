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
    "uidmap": {"apt-get": "uidmap", "dnf": "shadow-utils", "apk": "shadow-subids", "zypper": "shadow", "pacman": "shadow"},
    "kernel": {"apt-get": "linux-image-amd64", "apk": "linux-lts", "pacman": "linux", "zypper": "kernel-default"},
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


def as_root(command: str) -> str:
    """The command as this caller has to type it."""
    return command if os.geteuid() == 0 else f"sudo sh -c {shlex.quote(command)}"


def sysctl(name: str, value: int) -> str:
    """The command that sets a sysctl now and after the next boot."""
    return as_root(f"sysctl -w {name}={value} && echo {name}={value} >> {SYSCTL_FILE}")


def package_manager(os_release: str) -> str:
    """The install command of the distribution that an os-release(5) describes; apt-get where it is unknown."""
    fields = dict(line.split("=", 1) for line in os_release.splitlines() if "=" in line)
    words = f"{fields.get('ID', '')} {fields.get('ID_LIKE', '')}".replace('"', "").split()
    return next((_MANAGERS[part] for word in words for part in (word, word.split("-")[0]) if part in _MANAGERS),
                "apt-get install")  # fmt: skip


def install(what: str) -> str:
    """The command that installs a thing by this distribution's name for it."""
    command = package_manager(read("/etc/os-release"))
    return as_root(f"{command} {_PACKAGES[what].get(command.split()[0], what)}")
