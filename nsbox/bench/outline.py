"""The figures of ``nsbox bench`` in short, for machines: what each layer adds, and what the host's other programs
take."""

import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from nsbox.bench.start import BASELINE

OURS = (BASELINE, "nsbox", "fork")
VERSION_S = 5.0  #: how long a program may take to tell its version


def outline(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``host``; ``baseline``; ``layers`` with what each adds to the one before; ``peers`` as ratios to the baseline,
    with what each lacks as notes. Lists are empty where that benchmark was not among ``reports``."""
    by_name = {report["benchmark"]: report for report in reports}
    layers = by_name.get("layers", {}).get("rows", {})
    starts = by_name.get("start", {}).get("results", {})
    lacks = by_name.get("start", {}).get("lacks", {})
    base = starts.get(BASELINE) or layers.get(BASELINE)
    return {
        "host": reports[0]["host"] if reports else {},
        "baseline": {"name": BASELINE, "p50_us": base["p50_us"], "p95_us": base["p95_us"]} if base else None,
        "layers": [
            {"name": name, "p50_us": row["p50_us"], "p95_us": row["p95_us"], "delta_us": row.get("added_us", 0.0)}
            for name, row in layers.items()
        ],
        "peers": [
            {
                "name": name,
                "version": version(name),
                **{key: row[key] for key in ("p50_us", "p95_us", "ratio")},
                "notes": f"has not: {lacks[name]}" if lacks.get(name) else "",
            }
            for name, row in starts.items()
            if name not in OURS
        ],
    }


def version(name: str) -> str:
    """The first line that a program says of its version; empty where it says none."""
    program = shutil.which(name)
    if program is None:
        return ""
    try:
        told = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter((told.stdout or told.stderr).strip().splitlines()), "")
