"""What crosses the boundary of a sandbox that stays: its record, its changes, the ends of its secrets and its own."""

import os
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from nsbox import alarm
from nsbox.change import Change, ChangeSet
from nsbox.crossing import Crossing, upper_of, workspace_of
from nsbox.errors import SpecError
from nsbox.handle import Handle
from nsbox.report import Result
from nsbox.spec import Spec

if TYPE_CHECKING:
    from nsbox.outgoing import Applied, Exported, Held
    from nsbox.record import Record


class BoxCrossing(Crossing):
    """The record of one sandbox that stays. ``begin`` is for the launch; then ``opened``, and ``ended`` at the end."""

    def __init__(self, spec: Spec, sandbox_id: str, target: Any = None) -> None:
        super().__init__(spec, (), target)
        self._id = sandbox_id
        self._alarms: list[int] = []
        self._reason, self._ended_at = "exited", 0.0
        self._crossed: set[str] = set()  #: paths that have been told of
        self._policy: list[tuple[str, tuple[str, ...]]] = []  #: changes of egress, for the next handle
        self._own: dict[str, int] = {}  #: path → ctime of the host's file as apply left it

    def begin(self, handle: Handle) -> None:
        handle.id = self._id
        super().begin(handle)

    def longest(self) -> float | None:
        return self.spec.limits.lifetime

    def opened(self, handle: Handle) -> None:
        """The sandbox is there: secrets and the sandbox itself are ended in time, whether anybody uses it or not."""
        for action, rules in self._policy:
            _change(handle, action, rules)
        at = handle.next_revocation()
        if at is not None:
            self._alarms.append(alarm.at(at, lambda: self._revoke(handle)))
        if self.spec.limits.lifetime is not None:
            self._alarms.append(alarm.at(handle.started_at + self.spec.limits.lifetime, lambda: self._too_old(handle)))

    def _revoke(self, handle: Handle) -> None:
        handle.revoke_secrets(time.monotonic())
        at = handle.next_revocation()
        if at is not None:
            self._alarms.append(alarm.at(at, lambda: self._revoke(handle)))

    def _too_old(self, handle: Handle) -> None:
        limit = self.spec.limits.lifetime
        handle.ended_by = f"its lifetime limit of {limit:g} s"
        handle.kill()
        self.ended_by("lifetime", limit, "timeout")

    def ended_by(self, limit: str, value: float | None, reason: str = "") -> None:
        """A limit has ended the sandbox."""
        self._reason, self._ended_at = reason or limit, time.time()
        self.tell(lambda record: record.limit(limit, value, 1, self._ended_at - self.began))

    def command(self, result: Result) -> None:
        """A command in it is over: tell what it was, and which limits it touched."""
        self.tell(lambda record: self._tell_of(record, result))

    def _tell_of(self, record: "Record", result: Result) -> None:
        record.command(result.argv, result.reason, result.timing["run_ms"] / 1000, result.exit_code, result.signal)
        for hit in result.limits_hit:
            record.limit(hit["limit"], hit["value"], hit["count"], max(0.0, hit["first_at"] - self.began))

    def left(self) -> None:
        """The box leaves its handle for another, for which ``begin`` and ``opened`` are called again."""
        for number in self._alarms:
            alarm.cancel(number)
        self._alarms.clear()

    def ended(self, handle: Handle) -> None:
        """The sandbox is to go: its processes first, then what is left of the record. Raises LogError."""
        for number in self._alarms:
            alarm.cancel(number)
        handle.kill()
        lifetime = (self._ended_at or time.time()) - self.began
        if self._failed is not None:
            raise self._failed
        if self.record is None:
            return
        self._end_of_secrets(handle)
        handle.wait_until_gone()
        if handle.egress is not None:
            handle.egress.end()
            for hit in handle.egress.limits_hit():
                self.record.limit(hit["limit"], hit["value"], hit["count"], hit["first_at"] - self.began)
        found = self.outputs(handle)
        for entry in found.entries if found is not None else ():
            if entry.path not in self._crossed:
                self.record.output(entry.report())
        self.record.end(self._reason, lifetime)
        self._covered()

    def policy(self, handle: Handle, action: str, rules: Sequence[str]) -> None:
        """``allow`` or ``deny``, and tell the log. Raises as ``Sandbox.allow``."""
        self._check_log()
        _change(handle, action, rules)
        self._policy.append((action, tuple(rules)))
        from nsbox.boundary import open_egress

        wide = action == "allow" and open_egress("filtered", rules)
        self.tell(lambda record: record.policy(action, rules, open_egress=wide))
        self._check_log()

    def changes(self, handle: Handle, **options: Any) -> ChangeSet:
        """See ``Sandbox.changes``."""
        from nsbox import changes

        upper = self._upper(handle)
        try:
            return changes.scan(
                upper, workspace_of(handle), map_ids=handle.inside_id, look_for=handle.secrets.by_name(), **options
            )
        finally:
            os.close(upper)

    def diff(self, handle: Handle) -> str:
        """See ``Sandbox.diff``."""
        from nsbox import diff

        upper = self._upper(handle)
        try:
            return diff.unified(self.changes(handle), upper, workspace_of(handle))
        finally:
            os.close(upper)

    def export(self, handle: Handle, directory: str, allow_trusted: Collection[str] | bool) -> "Exported":
        """See ``Sandbox.export``."""
        from nsbox import transfer

        self._check_log()
        upper = self._upper(handle)
        try:
            found = self.changes(handle)
            done = transfer.export(found, upper, directory, allow_trusted=allow_trusted)
            self._crossing(found, "exported", done.copied, {"held_back": done.held_back, "skipped": done.skipped})
            return done
        finally:
            os.close(upper)

    def apply(
        self, handle: Handle, paths: Collection[str] | None, force: bool, allow_trusted: Collection[str] | bool
    ) -> "Applied":
        """See ``Sandbox.apply``."""
        from nsbox import transfer

        self._check_log()
        upper, workspace = self._upper(handle), workspace_of(handle)
        try:
            found = self.changes(handle)
            known = found._replace(entries=tuple(map(self._as_left, found.entries)))
            done = transfer.apply(
                known,
                upper,
                workspace,
                paths=paths,
                force=force,
                allow_trusted=allow_trusted,
                since_ns=self.since_ns(handle),
            )
            self._remember(workspace, done.applied)
            held = {"held_back": done.held_back, "conflict": done.conflicts, "skipped": done.skipped}
            self._crossing(found, "applied", done.applied, held)
            return done
        finally:
            os.close(upper)

    def _check_log(self) -> None:
        """Nothing goes out any more that could not be told."""
        if self._failed is not None:
            raise self._failed

    def _as_left(self, entry: Change) -> Change:
        """What apply itself has written is not a change that the host made meanwhile."""
        if entry.before is None or self._own.get(entry.path) != entry.before.ctime_ns:
            return entry
        return entry._replace(before=entry.before._replace(ctime_ns=0))

    def _remember(self, workspace: str, applied: Collection[str]) -> None:
        for path in applied:
            try:
                self._own[path] = os.lstat(os.path.join(workspace, path)).st_ctime_ns
            except OSError:  # it was a deletion
                self._own.pop(path, None)

    def _crossing(
        self, found: ChangeSet, action: str, done: Collection[str], held: "dict[str, tuple[Held, ...]]"
    ) -> None:
        """Tell the log what was done with each change. Raises LogError, which says what ``done`` was done with all the
        same; it is the end of the sandbox then."""
        if self.record is None:
            return
        verdicts = dict.fromkeys(done, (action, ""))
        for name, items in held.items():
            verdicts.update((item.path, (name, item.why)) for item in items)
        self._crossed.update(verdicts)
        told = [(entry.report(), *verdicts[entry.path]) for entry in found.entries if entry.path in verdicts]

        def tell(record: "Record") -> None:
            for fields in told:
                record.output(*fields)

        self.tell(tell)
        if self._failed is not None:
            from nsbox.boundary import LogError

            raise self._failed.after(action, done) if isinstance(self._failed, LogError) else self._failed

    def _upper(self, handle: Handle) -> int:
        if self.spec.workspace is None:
            raise SpecError("changes: the sandbox has no workspace; make it with workspace=DIR")
        return upper_of(handle)


def _change(handle: Handle, action: str, rules: Sequence[str]) -> None:
    egress = handle.egress
    if egress is None:
        raise SpecError(f"{action}: this sandbox has no filtered egress; make it with net='filtered'")
    (egress.allow if action == "allow" else egress.deny)(rules)
