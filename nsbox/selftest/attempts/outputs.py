"""Attempts on whoever collects what comes out: links, names, files that the host acts upon. Made in the directory."""

from __future__ import annotations

import os

from .calls import TOLD

#: names of any bytes but NUL and the slash
NAMES = (b"\xff\xfe", b"line\nfeed", b"\x1b[2J\x1b]0;title\x07", b"n" * 255, b"\xe2\x80\xaetxt.exe", b"-rf", b" ")
#: what tools of the host act upon by themselves
HOOKS = (".git/hooks/post-checkout", ".envrc", ".vscode/tasks.json", ".github/workflows/ci.yml", "conftest.py", "x.pth")


def links(text: str) -> object:
    """Links that lead to the file TEXT, absolute and by way of the directory."""
    os.symlink(text, "link")
    os.symlink(os.path.dirname(text), "folder")
    os.makedirs("d", exist_ok=True)
    os.symlink(text, "d/link")
    return "done"


def names(text: str) -> object:
    """Files of hostile names, that hold their name."""
    for name in NAMES:
        with open(name, "wb") as file:
            file.write(name)
    return "done"


def hooks(text: str) -> object:
    """Files that the host would act upon, with TEXT in them."""
    for name in HOOKS:
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w") as file:
            file.write(f"#!/bin/sh\n{text}\n")
        os.chmod(name, 0o755)
    return "done"


def forge(text: str) -> object:
    """Writes to the file TEXT, by its path and by everybody's descriptors."""
    ways = [text, *(f"/proc/{pid}/fd/{fd}" for pid in (1, *range(2, 20)) for fd in range(64))]
    for way in ways:
        try:
            held = os.open(way, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
        except OSError:
            continue
        if os.readlink(f"/proc/self/fd/{held}").endswith(os.path.basename(text)):
            os.write(held, b"for" + b"ged\n")
            return "done"
        os.close(held)
    return "not reached"


def read(text: str) -> object:
    """Reads the file TEXT, and says how much there was."""
    with open(text, "rb") as file:
        return f"read {len(file.read())}"


TOLD.update({"plant_links": links, "plant_names": names, "plant_hooks": hooks, "forge": forge, "read": read})
