#!/usr/bin/env python3
"""kernels.py [RESULTS]: docs/kernels.md, from what a run of `./bootstrap test-vm` found.

RESULTS becomes docs/kernels.json, from which the page is made; a test compares the two.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
COLUMNS = {
    "kernel": "kernel", "groups": "control groups", "caller": "caller", "tests": "tests", "memory": "memory",
    "pids": "processes", "cpu": "processors", "landlock": "Landlock", "root layer": "root layer",
}  # fmt: skip
CALLERS = {
    "root": "root",
    "user": "ordinary user",
    "user-delegated": "ordinary user, delegated groups",
    "root-without-userns": "root, no user namespaces",
    "user-without-userns": "ordinary user, no user namespaces",
}
PAGE = """# Kernels

What was tested in virtual machines, on kernels of Debian: `./bootstrap test-vm` boots them one after the other and lets
`tests/vm/inside` and, with control groups v2, `tests/host/test_cgroup_limits.py` run in each, for every kind of caller.
Made from `docs/kernels.json` by `python tests/vm/kernels.py`; how that works is told in `tests/vm/README.md`.

*memory*, *processes*, *processors* and *Landlock* are what nsbox itself said that it enforces there, and how strongly
([limits.md](limits.md)). *Root layer* is how the files of the root that belong to the host are shown inside: under the
sandbox's own ids, or, before Linux 6.3 where /run is a tmpfs, under the host's; an ordinary user's sandbox has only
one id. Without user namespaces nsbox must refuse, and say which setting mends it: the test is that it does.

{table}

Linux 5.12 is the oldest that can work, for it has the newest call that cannot be done without; what came later and what
is lost without it is in [theory.md](theory.md#kernel-versions).
"""


def _cells(row: dict[str, str]) -> list[str]:
    release, _, groups = row["kernel"].partition(", cgroup ")
    shown = {**row, "kernel": release, "groups": groups, "caller": CALLERS.get(row["caller"], row["caller"])}
    return [shown.get(column, "") or "–" for column in COLUMNS]


def page(rows: Sequence[dict[str, str]]) -> str:
    """The whole page."""
    lines = [list(COLUMNS.values()), ["---"] * len(COLUMNS), *map(_cells, rows)]
    return PAGE.format(table="\n".join("| " + " | ".join(cells) + " |" for cells in lines))


def main() -> None:
    """The command line."""
    if len(sys.argv) > 1:
        rows = json.loads(Path(sys.argv[1]).read_text())
        (DOCS / "kernels.json").write_text(json.dumps(rows, indent=1) + "\n")
    (DOCS / "kernels.md").write_text(page(json.loads((DOCS / "kernels.json").read_text())))


if __name__ == "__main__":
    main()
