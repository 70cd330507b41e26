"""What crosses the boundary of one run: told to the log as it happens, taken out at the end as far as was asked for."""

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nsbox.errors import NsboxError
from nsbox.launch import Handle, Prepared
from nsbox.report import Result
from nsbox.spec import Spec

if TYPE_CHECKING:
    from nsbox.boundary import Log
    from nsbox.change import ChangeSet
    from nsbox.outgoing import Applied, Exported
    from nsbox.record import Record

WORKSPACE_UPPER = "u1"  # native/mounts.c: the overlay that the plan numbers 1
_MODES = {"rw": "rw", "workspace": "cow"}


class Crossing:
    """The record of one run. ``target``: where the log goes (see ``nsbox.boundary.make_sink``); None: nowhere.

    When a log was asked for and cannot be written, LogError is raised and the run is over: fail closed.
    """

    def __init__(self, prepared: Prepared, argv: Sequence[str], target: Any = None) -> None:
        self.prepared, self.argv = prepared, list(argv)
        self.log: Log | None = None
        self._record: Record | None = None
        self._began = time.time()
        self._failed: Exception | None = None
        if target is not None:
            from nsbox import boundary

            self.log = boundary.Log(target)

    def begin(self, handle: Handle) -> None:
        """The sandbox exists: say what it is and what goes in."""
        if self.log is None:
            return
        from nsbox.boundary import open_egress
        from nsbox.record import Record

        spec, verdict = self.prepared.spec, self.prepared.verdict
        self._record = record = Record(self.log, handle.id, handle.masker())
        handle.on_revoked = record.secret_revoked
        record.start(
            self.argv,
            net=spec.net,
            open_egress=open_egress(spec.net, spec.allow),
            allow=spec.allow,
            limits=spec.limits._asdict() if hasattr(spec.limits, "_asdict") else vars(spec.limits),
            sensitive_mounts=[item._asdict() for item in verdict.let_through] if verdict else [],
            masked=[item._asdict() for item in verdict.masks] if verdict else [],
            pid=os.getpid(),
        )
        for source in self.prepared.plan.sources:
            record.input(source.path, source.option, _MODES.get(source.option, "ro"))
        for secret in handle.secrets.secrets:
            record.secret_delivered(secret.name, secret.deliver, secret.ttl)

    def on_network(self, event: str, fields: dict[str, Any]) -> None:
        """From the gateway's thread. Trouble with the log is kept, and ends the run when it is noticed."""
        if self._record is None or self._failed is not None:
            return
        try:
            self._record.event(event, **fields)
        except NsboxError as error:
            self._failed = error

    def outputs(self, handle: Handle) -> "ChangeSet | None":
        """What the run changed in its workspace; None where there is no workspace."""
        spec = self.prepared.spec
        if spec.workspace is None or handle.scratch_fd < 0:
            return None
        from nsbox import changes

        source = next(item for item in self.prepared.plan.sources if item.option == "workspace")
        upper = self._upper(handle)
        try:
            return changes.scan(upper, source.path, map_ids=handle.inside_id, look_for=handle.secrets.by_name())
        finally:
            os.close(upper)

    @staticmethod
    def _upper(handle: Handle) -> int:
        return os.open(WORKSPACE_UPPER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle.scratch_fd)

    def take_out(self, handle: Handle, found: "ChangeSet", result: Result) -> None:
        """Export and apply, as the Spec says; ``result.boundary`` then tells what crossed and what was held back."""
        from nsbox import transfer

        spec, verdicts = self.prepared.spec, {}
        upper = self._upper(handle)
        try:
            if spec.export is not None:
                verdicts.update(
                    _verdicts("exported", transfer.export(found, upper, spec.export, allow_trusted=spec.allow_trusted))
                )
            if spec.apply and result.ok:
                source = next(item for item in self.prepared.plan.sources if item.option == "workspace")
                applied = transfer.apply(
                    found, upper, source.path, allow_trusted=spec.allow_trusted, since_ns=int(self._began * 1e9)
                )
                verdicts.update(_verdicts("applied", applied))
        finally:
            os.close(upper)
        for entry in result.boundary["outputs"]:
            action, why = verdicts.get(entry["path"], ("seen", ""))
            entry["action"] = action
            if why:
                entry["why"] = why

    def finish(self, handle: Handle, result: Result) -> None:
        """The run is over: outputs, limits, destinations, the end. Raises LogError."""
        found = self.outputs(handle)
        if found is not None:
            result.boundary["outputs"] = [entry.report() for entry in found.entries]
            if self.prepared.spec.export is not None or self.prepared.spec.apply:
                self.take_out(handle, found, result)
        if self._record is None:
            return
        if self._failed is not None:
            raise self._failed
        for entry in result.boundary["outputs"]:
            fields = dict(entry)
            self._record.output(fields, fields.pop("action", "seen"), fields.pop("why", None))
        for secret in handle.secrets.secrets:
            if secret.name not in handle.revoked_at:
                self._record.secret_revoked(secret.name, "end")
        for hit in result.limits_hit:
            self._record.limit(hit["limit"], hit["value"], hit["count"], hit["first_at"] - self._began)
        self._record.end(
            result.reason,
            time.time() - self._began,
            exit_code=result.exit_code,
            signal=result.signal,
            usage=result.usage,
            timing=result.timing,
        )

    def fail(self, error: BaseException) -> None:
        """The run came to nothing; the record gets its end as far as it can be written."""
        if self._record is not None:
            try:
                self._record.end("error", time.time() - self._began, detail=str(error))
            except NsboxError:
                return

    def close(self) -> None:
        """Close the log. Idempotent."""
        if self.log is not None:
            self.log.close()


def _verdicts(done: str, outcome: "Exported | Applied") -> dict[str, tuple[str, str]]:
    """path → (what was done with it, why not)."""
    paths: tuple[str, ...] = getattr(outcome, "copied", ()) or getattr(outcome, "applied", ())
    out = dict.fromkeys(paths, (done, ""))
    for name in ("held_back", "conflicts", "skipped"):
        for held in getattr(outcome, name, ()):
            out[held.path] = ({"conflicts": "conflict"}.get(name, name), held.why)
    return out


def target_of(spec: Spec, log: Any) -> Any:
    """Where the log goes: what the call says, else what the Spec says."""
    return spec.log if log is None else log
