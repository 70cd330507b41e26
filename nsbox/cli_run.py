"""``nsbox run`` and what ``nsbox python`` shares with it: one sandbox, its streams passed on live, its status."""

from __future__ import annotations

import os
import time

from nsbox import api, cli_review, janitor
from nsbox.cli_options import Option
from nsbox.cli_output import Output, say
from nsbox.crossing import Review
from nsbox.errors import NsboxError, SpecError
from nsbox.light import TYPE_CHECKING
from nsbox.prepared import prepare
from nsbox.report import SCHEMA, Result
from nsbox.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_LIMIT_WORDS = {
    "timeout": "it ran for {value:g} s, the --timeout",
    "cpu_time": "it used {value:g} s of processor time, the --cpu-time",
    "memory": "it needed more than {size}, the --memory",
    "pids": "it made more than {value:g} processes and threads, the --pids",
    "cpu": "it waited for its share of {value:g} processors, the --cpus",
    "disk": "it wrote more than {size}, the --disk",
    "output": "it wrote more than {size}, the --output",
    "net_connections": "it wanted more than {value:g} connections at once, the --net-connections",
    "net_bytes": "it wanted to send more than {size}, the --net-bytes",
    "net_rate": "it waited for its {value:g} new connections a second, the --net-rate",
}


def spec_of(values: Mapping[str, Any], table: Sequence[Option]) -> Spec:
    """The Spec that a command line asks for: its options over those of the profile."""
    own = {option.key for option in table if option.own}
    options = {key: value for key, value in values.items() if key not in own}
    try:
        spec = Spec.from_profile(values["profile"], **options) if "profile" in values else Spec.from_dict(options)
        log = os.environ.get("NSBOX_LOG")
        return spec if spec.log or not log else spec.replace(log=log)
    except SpecError as error:
        raise SpecError(as_flag(str(error), table)) from None


def as_flag(message: str, table: Sequence[Option]) -> str:
    """An error about an option, by the name that the option has on the command line."""
    key, colon, rest = message.partition(":")
    flags = [option.flag for option in table if option.key == key]
    return f"{flags[0]}:{rest}" if colon and flags else message


class Report:
    """Where the report goes. The file is opened before anything runs: a report that cannot be written is told early."""

    def __init__(self, values: Mapping[str, Any], command: Sequence[str]) -> None:
        self.wanted = "report" in values
        self._command = list(command)
        self._json = bool(values.get("json"))
        self._file = -1
        if self.wanted:
            try:
                self._file = os.open(
                    values["report"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOCTTY, 0o666
                )
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise SpecError(f"--report: {values['report']!r}: {reason}; name a file that you may write") from None

    def give(self, text: str) -> None:
        """Write it wherever it is wanted."""
        data = text.encode() + b"\n"
        targets = [fd for fd, wanted in ((self._file, self.wanted), (1, self._json)) if wanted]
        for fd in targets:
            try:
                Output(fd, None, keep=False).write(data)
            except OSError as error:
                raise SpecError(f"--report: cannot be written: {error.strerror}; the run itself is over") from None

    def give_error(self, error: Exception) -> None:
        """The report of a run that came to nothing."""
        if self._file < 0 and not self._json:
            return
        import json

        facts = {"schema": SCHEMA, "argv": self._command, "exit_code": None, "signal": None, "reason": "error"}
        self.give(json.dumps({**facts, "error": str(error), "kind": type(error).__name__}))


def run(values: Mapping[str, Any], command: Sequence[str], table: Sequence[Option]) -> int:
    """One fresh sandbox for ``command``; the exit status. Raises what ``nsbox.run`` raises."""
    janitor.at_once()
    report = Report(values, command)
    terminal = cli_review.terminal(values)
    try:
        spec = spec_of({**values, **cli_review.options(values)}, table)
        if values.get("verbose"):
            _describe(spec)
        result = _run(values, spec, command, report, terminal)
    except NsboxError as error:
        report.give_error(error)
        if isinstance(error, SpecError):
            raise SpecError(as_flag(str(error), table)) from None
        raise
    finally:
        if terminal is not None:
            terminal.close()
    if report.wanted or values.get("json"):
        report.give(result.to_json())
    if not values.get("quiet"):
        cli_review.tell(result, verbose=bool(values.get("verbose") or terminal))
        _tell(result, spec, bool(values.get("verbose")))
    return result.status


def _describe(spec: Spec) -> None:
    try:
        lines = prepare(spec).plan.describe()
    except NsboxError:  # said, and recorded, by the run itself
        return
    for line in lines:
        say(line)


def _run(
    values: Mapping[str, Any], spec: Spec, command: Sequence[str], report: Report, review: Review | None
) -> Result:
    if values.get("tty"):
        from nsbox import cli_shell

        return cli_shell.run(values, spec, command, report, review)
    data, publish = 0 if values.get("stdin") else None, values.get("publish", ())
    if values.get("json"):
        return api.run(command, spec, stdin=data, review=review, publish=publish)
    timeout = spec.limits.timeout
    deadline = None if timeout is None else time.monotonic() + timeout
    out, err = (Output(fd, deadline, keep=report.wanted) for fd in (1, 2))
    result = api.run(
        command, spec, stdin=data, on_stdout=out.write, on_stderr=err.write, review=review, publish=publish
    )
    if report.wanted:
        result.stdout, result.stderr = b"".join(out.kept or ()), b"".join(err.kept or ())
    return result


def _size(count: float) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.3g} {unit}"
    return f"{count:g} bytes"


def _tell(result: Result, spec: Spec, verbose: bool) -> None:
    watched = [name for name, layer in result.enforced.items() if layer["strength"] == "watched"]
    weaker = [name for name in watched if name not in spec.degrade]
    if weaker:
        say(f"watched, not held by the kernel: {', '.join(weaker)}; nsbox doctor tells why, --degrade accepts it")
    for hit in result.limits_hit:
        name, value = hit["limit"], hit["value"]
        words = _LIMIT_WORDS.get(name, name).format(value=value, size=_size(value))
        if name == result.reason:
            say(f"{result.argv[0]} was ended: {words}")
        elif name == "output":
            say(f"the output is not complete: {words}")
        elif name != "cpu" or verbose:  # to be slowed down is what that limit is for
            say(f"{result.argv[0]} touched a limit: {words}")
    if verbose:
        for step, micros in result.steps.items():
            say(f"{step:<13}{micros:9.1f} µs")
        timing = ", ".join(f"{name.removesuffix('_ms')} {value:.1f} ms" for name, value in result.timing.items())
        say(f"{result.reason}, status {result.status}; {timing}")
