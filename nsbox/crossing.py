"""What crosses the boundary of one run: told to the log as it happens, taken out at the end as far as was asked for."""

from __future__ import annotations

import os
import sys
import time
from _collections_abc import Callable

from nsbox import inputs
from nsbox.errors import CommandError, HostError, MountRefused, NsboxError, SpecError
from nsbox.handle import Handle
from nsbox.light import TYPE_CHECKING
from nsbox.report import Result
from nsbox.spec import Spec
from nsbox.supervise import Run, drive

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from nsbox.boundary import Log
    from nsbox.change import ChangeSet
    from nsbox.outgoing import Applied, Exported
    from nsbox.ports import Forward
    from nsbox.record import Record

WORKSPACE_UPPER = "u1"  # native/mounts.c: the overlay that the plan numbers 1
#: Is shown the changes as text, and says whether they may be taken out.
Review = Callable[[str], bool]


class Crossing:
    """The record of one run. ``target``: where the log goes (see ``nsbox.boundary.make_sink``); None: nowhere.

    When a log was asked for and cannot be written, LogError is raised and the run is over: fail closed. Raises
    SpecError for a log that the payload could write to, and for an export that has no place to go to.
    """

    def __init__(self, spec: Spec, argv: Sequence[str], target: Any = None, review: Review | None = None) -> None:
        self.spec, self.argv, self.review = spec, list(argv), review
        self.log: Log | None = None
        self.record: Record | None = None
        self.began = time.time()
        self._handle: Handle | None = None
        self._inputs: list[dict[str, Any]] = []  #: as the log was told of them, where there is one
        self._failed: NsboxError | None = None
        self._over = False  #: the record has its end
        if spec.export is not None:
            _check_export(spec.export)
        if target is not None:
            from nsbox import boundary

            _check_log(target, spec)
            self.log = boundary.Log(target)

    def begin(self, handle: Handle) -> None:
        """Everything is known, and nothing runs yet: say what the sandbox is and what goes in."""
        self._handle = handle
        if self.log is None:
            return
        if self.record is not None:  # a second attempt at the same launch
            handle.id, handle.on_revoked = self.record.sandbox, self._revoked
            return
        from nsbox.boundary import open_egress
        from nsbox.record import Record

        spec, verdict = self.spec, handle.prepared.verdict
        self.record = record = Record(self.log, handle.id, handle.masker())
        handle.on_revoked = self._revoked
        record.start(
            self.argv,
            net=spec.net,
            open_egress=open_egress(spec.net, spec.allow),
            allow=spec.allow,
            limits=vars(spec.limits),
            sensitive_mounts=[item._asdict() for item in verdict.let_through] if verdict else [],
            masked=[item._asdict() for item in verdict.masks] if verdict else [],
            found=_credentials(spec),
            max_lifetime_s=self.longest(),
            pid=os.getpid(),
        )
        self._inputs = inputs.with_hashes(inputs.of(handle))
        for entry in self._inputs:
            record.input(entry["path"], entry["kind"], entry["mode"], entry["bytes"], entry.get("sha256"))
        for secret in handle.secrets.secrets:
            record.secret_delivered(secret.name, secret.deliver, secret.ttl)

    def longest(self) -> float | None:
        """How many seconds the sandbox may exist."""
        return self.spec.limits.timeout

    def on_network(self, event: str, fields: dict[str, Any]) -> None:
        """From the gateway's thread: where the log cannot be written, the sandbox ends, and its thread is told why."""
        if self.record is not None:
            self.tell(lambda record: record.event(event, **fields))

    def _revoked(self, name: str, why: str) -> None:
        self.tell(lambda record: record.secret_revoked(name, why))

    def tell(self, event: Callable[[Record], None]) -> None:
        """Write an event from whatever thread; trouble with the log ends the sandbox."""
        if self.record is None or self._failed is not None:
            return
        try:
            event(self.record)
        except NsboxError as error:
            self._failed = error
            if self._handle is not None:
                self._handle.kill()

    def outputs(self, handle: Handle) -> ChangeSet | None:
        """What has changed in the workspace; None where there is none. Raises OSError."""
        if self.spec.workspace is None or handle.scratch_fd < 0:
            return None
        from nsbox import changes

        upper = upper_of(handle)
        try:
            return changes.scan(
                upper, workspace_of(handle), map_ids=handle.inside_id, look_for=handle.secrets.by_name()
            )
        finally:
            os.close(upper)

    def take_out(self, handle: Handle, found: ChangeSet, result: Result) -> None:
        """Export and apply, as the Spec says; ``result.boundary`` then tells what crossed and what was held back, also
        when it raises in between."""
        from nsbox import transfer

        spec, verdicts = self.spec, {}
        wanted = spec.apply and result.ok
        upper = upper_of(handle)
        try:
            if self.review is not None and (wanted or spec.export) and found.entries:
                from nsbox import diff

                if not self.review(diff.unified(found, upper, workspace_of(handle))):
                    verdicts.update(dict.fromkeys((entry.path for entry in found.entries), ("seen", "declined")))
                    return
            if spec.export is not None:
                exported = transfer.export(found, upper, spec.export, allow_trusted=spec.allow_trusted)
                verdicts.update(_verdicts("exported", exported))
            if wanted:
                since, allowed = self.since_ns(handle), spec.allow_trusted
                applied = transfer.apply(found, upper, workspace_of(handle), allow_trusted=allowed, since_ns=since)
                verdicts.update(_verdicts("applied", applied))
        finally:
            os.close(upper)
            _note(result, verdicts)

    def conduct(self, watch: Run, publish: Sequence[int | str] = ()) -> Result:
        """Watch a run to its end, with ports forwarded meanwhile; its result. Raises SpecError for a port that cannot
        be had, and what ``conclude`` raises."""
        forwards: list[Forward] = []
        try:
            if publish:
                from nsbox.ports import publish_all

                forwards = publish_all(publish, watch.handle, watch)
            drive(watch)
            return self.conclude(watch)
        finally:
            for forward in forwards:
                forward.close()

    def conclude(self, watch: Run) -> Result:
        """The run is over: its result, once the record is complete. Raises what went wrong, and what ``finish``
        raises."""
        if isinstance(watch.error, CommandError):
            watch.error.command = self.argv[0]
        if watch.error is not None:
            raise watch.error
        result = Result(watch, watch.handle.id, self.argv)
        self.finish(watch.handle, result)
        return result

    def since_ns(self, handle: Handle) -> int:
        """From when on a change that the host makes in the workspace is one that the sandbox does not know. A copy may
        be older than the run: in a pool it is made with the sandbox."""
        return int(min(self.began, handle.copied_at or self.began) * 1e9)

    def finish(self, handle: Handle, result: Result) -> None:
        """The run is over: limits, outputs, the end. Raises SpecError for an incomplete set to apply, LogError, which
        says what was taken out before the log failed."""
        lifetime = time.time() - self.began
        if self._inputs:  # what has changed since is another size, and another hash
            result.boundary["inputs"] = self._inputs
        if self._failed is not None:
            raise self._failed
        if self.record is not None:  # before anything is taken out: a log that fails by now stops it
            self._end_of_secrets(handle)
            for hit in result.limits_hit:
                self.record.limit(hit["limit"], hit["value"], hit["count"], hit["first_at"] - self.began)
        found = self.outputs(handle)
        if found is not None:
            result.boundary["outputs"] = [entry.report() for entry in found.entries]
        try:
            if found is not None and (self.spec.export is not None or self.spec.apply):
                self.take_out(handle, found, result)
        finally:  # what crossed before something went wrong is told as well
            if self.record is not None:
                self._tell(self.record, result, lambda record: _tell_outputs(record, result))
        if self.record is not None:
            ended = {name: getattr(result, name) for name in ("exit_code", "signal", "usage", "timing")}
            self._over = True
            self._tell(self.record, result, lambda record: record.end(result.reason, lifetime, **ended))
            self._tell(self.record, result, lambda record: self._covered())

    def _tell(self, record: Record, result: Result, events: Callable[[Record], None]) -> None:
        """Once something may have been taken out. LogError says what was."""
        from nsbox.boundary import LogError

        try:
            events(record)
        except LogError as error:
            for action in ("exported", "applied"):
                paths = [entry["path"] for entry in result.boundary["outputs"] if entry.get("action") == action]
                error.after(action, paths)
            raise

    def _end_of_secrets(self, handle: Handle) -> None:
        for secret in handle.secrets.secrets:
            if self.record is not None and secret.name not in handle.revoked_at:
                self.record.secret_revoked(secret.name, "end")

    def _covered(self) -> None:
        """What this process executes inside and past the sandboxes, where it is counted."""
        counter = sys.modules.get("nsbox.coverage")
        if counter is not None and counter.installed() and self.log is not None:
            from nsbox.record import Record

            Record(self.log, "").coverage(counter.snapshot())

    def fail(self, error: BaseException) -> None:
        """The run came to nothing: its record gets an end, or a refusal, as far as that can be written."""
        if self.log is None or self._over:
            return
        from nsbox.boundary import LogError
        from nsbox.record import Record

        try:
            if isinstance(self._failed or error, LogError):
                return
            if self.record is not None:
                reason = "error" if isinstance(error, Exception) else "cancelled"
                self.record.end(reason, time.time() - self.began, detail=str(error) or type(error).__name__)
            elif isinstance(error, MountRefused):
                Record(self.log, "").refusal("guard", error.why, error.path, error.word)
            elif isinstance(error, NsboxError):
                kind = "host" if isinstance(error, HostError) else "spec"
                Record(self.log, "").refusal(kind, str(error))
        except NsboxError:
            return

    def close(self) -> None:
        """Close the log. Idempotent."""
        if self.log is not None:
            self.log.close()


def upper_of(handle: Handle) -> int:
    """A descriptor of the workspace's upper directory; the caller closes it."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if not handle.layers:
        scratch = handle.copied("scratch_fd")
        try:
            return os.open(WORKSPACE_UPPER, flags, dir_fd=scratch)
        finally:
            os.close(scratch)
    from nsbox import snapshot

    # The copy goes with the object that stands for it: it stays readable through what is open by then.
    handle.merged = (*handle.merged[-3:], snapshot.merged(handle, handle.layers))
    return os.open(WORKSPACE_UPPER, flags, dir_fd=handle.merged[-1].fd)


def workspace_of(handle: Handle) -> str:
    """The workspace's own directory on the host, canonical since the launch."""
    return next(item.path for item in handle.prepared.plan.sources if item.option == "workspace")


def _tell_outputs(record: Record, result: Result) -> None:
    for entry in result.boundary["outputs"]:
        fields = dict(entry)
        record.output(fields, fields.pop("action", "seen"), fields.pop("why", None))


def _note(result: Result, verdicts: dict[str, tuple[str, str]]) -> None:
    for entry in result.boundary["outputs"]:
        action, why = verdicts.get(entry["path"], ("seen", ""))
        entry["action"] = action
        if why:
            entry["why"] = why


def _verdicts(done: str, outcome: Exported | Applied) -> dict[str, tuple[str, str]]:
    """path → (what was done with it, why not)."""
    paths: tuple[str, ...] = getattr(outcome, "copied", ()) or getattr(outcome, "applied", ())
    out = dict.fromkeys(paths, (done, ""))
    for name in ("held_back", "conflicts", "skipped"):
        for held in getattr(outcome, name, ()):
            out[held.path] = ({"conflicts": "conflict"}.get(name, name), held.why)
    return out


def _check_export(path: str) -> None:
    """A directory that is not empty is told before anything runs."""
    try:
        with os.scandir(path) as entries:
            if next(entries, None) is not None:
                raise SpecError(f"export: {path!r} is not empty; name a new or empty directory")
    except FileNotFoundError:
        return
    except OSError as error:
        raise SpecError(f"export: {path!r}: {error.strerror}; name a new or empty directory") from None


def _check_log(target: Any, spec: Spec) -> None:
    """A log that the payload could change is none."""
    if not isinstance(target, str | os.PathLike) or target == "otel":
        return
    from nsbox.boundary import exposed_by

    path = os.fspath(target)
    shown = exposed_by(path, [os.path.realpath(bind.source) for bind in spec.rw])
    if shown is not None:
        raise SpecError(f"log: {path!r} lies in {shown!r}, which the sandbox may write to; name another place")


def _credentials(spec: Spec) -> list[str]:
    """Variables that are given to the sandbox and look like credentials."""
    if not spec.env:
        return []
    from nsbox import guard

    return [name for name in spec.env if guard.variable(name)]


def target_of(spec: Spec, log: Any) -> Any:
    """Where the log goes: what the call says, else what the Spec says."""
    return spec.log if log is None else log
