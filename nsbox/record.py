"""The events of one sandbox, by name: what each carries is said here and in docs/boundary-log.schema.json."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nsbox.boundary import Log

if TYPE_CHECKING:
    from nsbox.masking import Masker


class Record:
    """Writes the events of one sandbox. Every method raises LogError when the log cannot be written."""

    def __init__(self, log: Log, sandbox: str, masker: "Masker | None" = None) -> None:
        self.log, self.sandbox, self.masker = log, sandbox, masker

    def event(self, name: str, /, **fields: Any) -> None:
        """One event; fields that are None are left out."""
        self.log.emit(self.sandbox, name, fields, self.masker)

    def start(
        self,
        argv: Iterable[str],
        *,
        net: str = "none",
        open_egress: bool = False,
        allow: Iterable[str] = (),
        limits: Mapping[str, Any] | None = None,
        sensitive_mounts: Iterable[Mapping[str, Any]] = (),
        masked: Iterable[Mapping[str, Any]] = (),
        found: Iterable[str] = (),
        profile: str | None = None,
        max_lifetime_s: float | None = None,
        host: str | None = None,
        pid: int | None = None,
    ) -> None:
        """A sandbox exists. ``found`` are credentials that are inside without anybody's purpose, by path or name."""
        self.event(
            "sandbox.start",
            argv=list(argv),
            profile=profile,
            net=net,
            open_egress=open_egress,
            allow=list(allow),
            limits=limits,
            sensitive_mounts=list(sensitive_mounts),
            masked=list(masked),
            found=list(found),
            max_lifetime_s=max_lifetime_s,
            host=host,
            pid=pid,
        )

    def input(self, path: str, kind: str, mode: str, size: int | None = None, sha256: str | None = None) -> None:
        """Something of the host is visible inside. ``kind`` is the option that did it, ``mode`` ro, rw or cow."""
        self.event("input", path=path, kind=kind, mode=mode, bytes=size, sha256=sha256)

    def secret_delivered(self, name: str, delivered_as: str, ttl_s: float | None = None) -> None:
        """A secret is inside, as ``file``, ``env`` or ``fd``. Its value is never in the log."""
        self.event("secret.deliver", name=name, delivered_as=delivered_as, ttl_s=ttl_s)

    def secret_revoked(self, name: str, why: str) -> None:
        """A secret is gone: ``end`` of the task, or its ``ttl``."""
        self.event("secret.revoke", name=name, why=why)

    def dns_query(self, name: str, kind: str, verdict: str, answers: Iterable[str] = ()) -> None:
        """A name was asked for; ``verdict`` is allowed or denied."""
        self.event("dns.query", name=name, kind=kind, verdict=verdict, answers=list(answers))

    def connect(
        self,
        address: str,
        port: int,
        protocol: str,
        verdict: str,
        *,
        host: str | None = None,
        connections: int = 1,
        tx_bytes: int | None = None,
        rx_bytes: int | None = None,
        why: str | None = None,
    ) -> None:
        """A destination was tried, or a connection to it has ended (then with its counters)."""
        self.event(
            "connect",
            address=address,
            port=port,
            protocol=protocol,
            verdict=verdict,
            host=host,
            connections=connections,
            tx_bytes=tx_bytes,
            rx_bytes=rx_bytes,
            why=why,
        )

    def limit(self, limit: str, value: Any = None, count: int = 1, first_at: float | None = None) -> None:
        """A limit was touched, ``count`` times; ``first_at`` is in seconds from the start."""
        self.event("limit", limit=limit, value=value, count=count, first_at=first_at)

    def output(self, change: Mapping[str, Any], action: str = "seen", why: str | None = None) -> None:
        """A changed path (``Change.report()``); ``action``: seen, exported, applied, held_back, conflict or skipped."""
        self.event("output", **change, action=action, why=why)

    def end(
        self,
        reason: str,
        lifetime_seconds: float,
        *,
        exit_code: int | None = None,
        signal: int | None = None,
        usage: Mapping[str, Any] | None = None,
        timing: Mapping[str, Any] | None = None,
        detail: str | None = None,
    ) -> None:
        """The sandbox is gone."""
        self.event(
            "sandbox.end",
            reason=reason,
            lifetime_seconds=round(lifetime_seconds, 6),
            exit_code=exit_code,
            signal=signal,
            usage=usage,
            timing=timing,
            detail=detail,
        )

    def command(
        self, argv: Iterable[str], reason: str, seconds: float, exit_code: int | None = None, signal: int | None = None
    ) -> None:
        """A command is over in a sandbox that stays."""
        self.event(
            "command", argv=list(argv), reason=reason, seconds=round(seconds, 6), exit_code=exit_code, signal=signal
        )

    def policy(self, action: str, rules: Iterable[str], *, open_egress: bool = False) -> None:
        """What filtered egress lets through has changed: ``allow`` more, or ``deny``, from now on."""
        self.event("policy", action=action, rules=list(rules), open_egress=open_egress)

    def refusal(self, kind: str, why: str, path: str | None = None, word: str | None = None) -> None:
        """Something was asked for and refused before anything was started: ``guard``, ``host``, ``spec``, ``log``."""
        self.event("refusal", kind=kind, why=why, path=path, word=word)

    def coverage(self, snapshot: Mapping[str, Any]) -> None:
        """What the embedding process has executed until now (``nsbox.coverage.snapshot()``)."""
        self.event("coverage", **snapshot)
