"""What a run came to: the ``Result`` for Python and the same as JSON."""

from __future__ import annotations

import os
import time

from nsbox import inputs
from nsbox.errors import CommandFailed, LimitExceeded, TimeoutExceeded
from nsbox.light import TYPE_CHECKING
from nsbox.light import signal as _signal
from nsbox.secrets import describe
from nsbox.supervise import Run

if TYPE_CHECKING:
    from typing import Any

SCHEMA = 1
REASONS = ("exited", "signaled", "timeout", "cpu_time", "memory", "pids", "disk", "output", "cancelled", "error")
_USAGE = (
    *("cpu_user_s", "cpu_system_s", "memory_peak_bytes", "pids_peak", "disk_used_bytes"),
    *("io_read_bytes", "io_write_bytes", "net_rx_bytes", "net_tx_bytes"),
    # Seconds that some process inside waited for it; only cgroup v2 tells, where the kernel has PSI.
    *("pressure_cpu_s", "pressure_io_s", "pressure_memory_s"),
)


class Result:
    """How a run ended. ``stdout`` and ``stderr`` are the bytes kept; ``exit_code`` is None when a signal ended it."""

    lease: dict[str, Any]  #: only of a sandbox made ahead: by what it is known to be fresh

    def __init__(self, run: Run, sandbox_id: str, argv: list[str]) -> None:
        #: every limit that was touched, with ``limit``, ``value``, ``count`` and ``first_at`` (seconds since the epoch)
        self.limits_hit: list[dict[str, Any]] = run.conclude()
        status = run.status
        self.schema = SCHEMA
        self.id = sandbox_id  #: the sandbox's, as in the boundary log
        self.argv = argv
        #: None when a signal ended it
        self.exit_code: int | None = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
        #: None when it ended by itself
        self.signal: int | None = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        if status is None:
            # init was killed before it could tell; it goes down only by SIGKILL.
            self.signal = int(_signal.SIGKILL)
        #: exited, signaled, timeout, cpu_time, memory, pids, disk, output, cancelled or error
        self.reason: str = run.reason or ("exited" if self.exit_code is not None else "signaled")
        self.stdout, self.stderr = run.stdout.data, run.stderr.data
        self.stdout_truncated, self.stderr_truncated = run.stdout.truncated, run.stderr.truncated
        self.timing = _timing(run)  #: milliseconds: ``setup_ms``, ``run_ms``, ``teardown_ms``, ``total_ms``
        self.steps = run.steps  #: microseconds from one set-up stage's end to the next, as measured in C
        #: what was used, by name with its unit; None where nothing tells
        self.usage: dict[str, float | int | None] = {name: run.usage.get(name) for name in _USAGE}
        #: layer → ``strength`` (kernel, watched or none) and ``how``
        self.enforced: dict[str, dict[str, str]] = run.handle.enforced
        verdict = run.handle.prepared.verdict
        #: what crossed: ``inputs``, ``outputs``, ``destinations``, ``secrets``, ``sensitive_mounts``
        self.boundary: dict[str, list[dict[str, Any]]] = {
            "inputs": inputs.of(run.handle),
            "destinations": run.handle.egress.record() if run.handle.egress else [],
            "sensitive_mounts": [item._asdict() for item in verdict.let_through] if verdict else [],
            "outputs": [],
            "secrets": describe(run.handle.secrets, run.handle.revoked_at),
        }

    @property
    def stdout_text(self) -> str:
        """``stdout`` as text; bytes that are not UTF-8 are replaced. Never raises."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """``stderr`` as text; bytes that are not UTF-8 are replaced. Never raises."""
        return self.stderr.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself with status 0."""
        return self.reason == "exited" and self.exit_code == 0

    @property
    def status(self) -> int:
        """The exit status that ``nsbox run`` gives: the command's own, 128+n, 124 or 137."""
        if self.reason in ("timeout", "cpu_time"):
            return 124
        if self.reason == "memory":
            return 137
        return self.exit_code if self.exit_code is not None else 128 + (self.signal or 0)

    def check(self) -> Result:
        """Itself when ``ok``; else raises TimeoutExceeded, LimitExceeded or CommandFailed, as subprocess would."""
        if self.ok:
            return self
        name = self.argv[0]
        if self.reason in ("timeout", "cpu_time"):
            raise TimeoutExceeded(self.reason, f"{name} was ended by the {self.reason} limit")
        if self.reason in ("memory", "pids", "disk", "output"):
            raise LimitExceeded(self.reason, f"{name} was ended by the {self.reason} limit")
        how = f"signal {self.signal}" if self.exit_code is None else f"status {self.exit_code}"
        raise CommandFailed(f"{name} ended with {how}: {self.stderr_text[-300:].strip()}")

    def to_dict(self) -> dict[str, Any]:
        """The report, ready for JSON; a stream that is not UTF-8 becomes ``{"base64": …}``."""
        out = dict(vars(self))
        out["stdout"], out["stderr"] = _json_bytes(self.stdout), _json_bytes(self.stderr)
        return out

    def to_json(self) -> str:
        """The report as one line of JSON."""
        import json

        return json.dumps(self.to_dict(), ensure_ascii=True)

    def __repr__(self) -> str:
        return f"<nsbox.Result {self.argv[0]!r} {self.reason} status={self.status}>"


def _json_bytes(data: bytes) -> str | dict[str, str]:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        import base64

        return {"base64": base64.b64encode(data).decode("ascii")}


def _timing(run: Run) -> dict[str, float]:
    """Milliseconds: from asking to the payload's exec, its run, from its end to now."""
    now = time.monotonic()
    started = run.stamps.get("exec", 0) / 1e9 or run.handle.cloned_at
    ended = run.stamps.get("run", 0) / 1e9 or run.ended_at or now
    began = run.handle.started_at
    parts = {
        "setup_ms": started - began,
        "run_ms": ended - started,
        "teardown_ms": now - ended,
        "total_ms": now - began,
    }
    return {name: round(max(0.0, value) * 1000, 3) for name, value in parts.items()}
