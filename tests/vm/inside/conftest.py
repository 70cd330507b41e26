"""Says, at the end of a pass, what nsbox enforces for this caller on this machine: layer → strength and how."""

import json
import os
from pathlib import Path

import pytest

import nsbox
from nsbox import probe
from nsbox.errors import NsboxError


def _facts() -> dict[str, object]:
    try:
        result = nsbox.run(["true"], timeout="2m")
    except NsboxError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    host = probe.host()
    layer = "idmapped" if host.idmap else "not idmapped"
    return {
        "enforced": result.enforced,
        "skeleton": layer if host.privileged else "one id",
        "total_ms": result.timing["total_ms"],
    }


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    if path := os.environ.get("NSBOX_VM_FACTS"):
        Path(path).write_text(json.dumps(_facts(), indent=1) + "\n")
