"""Prints, as JSON, what nsbox says that it enforces for this caller here: layer → strength and how."""

import json

import nsbox
from nsbox import probe
from nsbox.errors import NsboxError


def facts() -> dict[str, object]:
    try:
        result = nsbox.run(["true"], timeout="2m")
    except NsboxError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    host = probe.host()
    idmap = "idmapped" if host.idmap else "not idmapped"
    return {
        "enforced": result.enforced,
        "skeleton": idmap if host.privileged else "one id, nothing to map",
        "total_ms": result.timing["total_ms"],
    }


if __name__ == "__main__":
    print(json.dumps(facts(), indent=1))
