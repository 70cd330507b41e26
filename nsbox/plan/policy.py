"""Seccomp policies as values, and the reader of ``profiles/seccomp.toml`` (which describes its own format).

A policy says what each named system call answers; turning names into numbers and numbers into a program is
``bpf.py``'s work. This module is imported only when no compiled filter is cached, see ``filter.py``.
"""

import errno
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsbox.errors import SpecError
from nsbox.profiles import profiles_dir

ALLOW = 0x7FFF0000
"""SECCOMP_RET_ALLOW."""

WORD = 0xFFFFFFFF

INIT_CALLS = frozenset(
    (
        *("read", "write", "close", "openat", "fcntl", "dup3", "close_range", "fchdir", "chdir", "umask", "ioctl"),
        *("clone", "execve", "execveat", "wait4", "waitid", "exit_group", "kill", "setsid", "prctl", "prlimit64"),
        *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigtimedwait", "signalfd4", "ppoll"),
        *("sendmsg", "recvmsg", "getrusage", "clock_gettime", "mmap", "munmap", "faccessat"),
    )
)
"""What our own init calls after it has installed the filter on itself. A policy without one of these cannot launch."""


def errno_action(number: int) -> int:
    """SECCOMP_RET_ERRNO with `number`."""
    return 0x00050000 | number


UNKNOWN = errno_action(errno.ENOSYS)
"""The answer for a number that no policy names, a foreign architecture, and x32."""

REFUSED = errno_action(errno.EPERM)


@dataclass(frozen=True, slots=True)
class Test:
    """True when ``args[arg] & mask`` is one of `values`; 32 bits."""

    __test__ = False  # not a test case for pytest

    arg: int
    values: tuple[int, ...]
    mask: int = WORD

    def holds(self, args: tuple[int, ...]) -> bool:
        return args[self.arg] & self.mask in self.values


@dataclass(frozen=True, slots=True)
class Case:
    """An answer that is given when all `tests` hold."""

    tests: tuple[Test, ...]
    action: int


@dataclass(frozen=True, slots=True)
class Rule:
    """What one call answers: the action of the first case that holds, else `action`. `origin` is its group or check."""

    call: str
    action: int
    cases: tuple[Case, ...] = ()
    origin: str = ""

    def answer(self, args: tuple[int, ...]) -> int:
        for case in self.cases:
            if all(test.holds(args) for test in case.tests):
                return case.action
        return self.action

    @property
    def may_allow(self) -> bool:
        """Whether there are arguments with which the call is allowed."""
        return self.action == ALLOW or any(case.action == ALLOW for case in self.cases)


@dataclass(frozen=True, slots=True)
class Policy:
    """An immutable allow-list. `rules` are sorted by name; a call without a rule answers `default`."""

    name: str
    why: str
    rules: tuple[Rule, ...]
    default: int = UNKNOWN

    def rule(self, call: str) -> Rule:
        """The rule of `call`, also where none is named."""
        for rule in self.rules:
            if rule.call == call:
                return rule
        return Rule(call, self.default)

    def with_rules(self, changed: Iterable[Rule]) -> "Policy":
        """A copy in which `changed` replace the rules of the same calls."""
        rules = {rule.call: rule for rule in (*self.rules, *changed)}
        return replace(self, rules=_sorted(rules))

    def without(self, calls: Iterable[str]) -> "Policy":
        """A copy that does not name `calls`."""
        dropped = frozenset(calls)
        return replace(self, rules=tuple(rule for rule in self.rules if rule.call not in dropped))


def load_policies(path: Path | None = None) -> dict[str, Policy]:
    """Reads the policies of `path` (by default the shipped ``seccomp.toml``), least permissive first.

    Raises SpecError, naming file and entry, where the file is missing, is no TOML, or says something senseless.
    """
    if path is None:
        path = Path(profiles_dir(), "seccomp.toml")
    try:
        return parse_policies(path.read_bytes(), str(path))
    except OSError as error:
        raise SpecError(f"cannot read the system-call policies {path}: {error.strerror}") from error


def parse_policies(text: bytes, source: str = "seccomp.toml") -> dict[str, Policy]:
    """The policies written in `text`; `source` names it in errors. Raises SpecError."""
    try:
        document = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{source}: not valid TOML: {error}") from error
    return _Reader(document, source).policies()


def customised(
    policies: Mapping[str, Policy], name: str, extra_allow: Iterable[str] = (), extra_deny: Iterable[str] = ()
) -> Policy:
    """The policy `name` with some calls more and some fewer.

    A call can be added only as far as some shipped policy allows it: what none allows is dangerous for a reason that
    does not go away by asking. Raises SpecError.
    """
    policy = policies.get(name)
    if policy is None:
        raise SpecError(f"unknown seccomp policy {name!r}: choose one of {', '.join(policies)}")
    return policy.with_rules((*_added(policies, extra_allow), *_removed(policy, extra_deny)))


def _added(policies: Mapping[str, Policy], calls: Iterable[str]) -> list[Rule]:
    rules = []
    for call in calls:
        allowing = [rule for policy in policies.values() if (rule := policy.rule(call)).may_allow]
        if not allowing:
            origin = next((policy.rule(call).origin for policy in policies.values()), "")
            reason = f"it is in the dangerous group {origin!r}" if origin else "no policy names it; is it spelt right?"
            raise SpecError(f"system call {call!r} cannot be allowed: {reason}")
        rules.append(allowing[-1])
    return rules


def _removed(policy: Policy, calls: Iterable[str]) -> list[Rule]:
    rules = []
    for call in calls:
        if call in INIT_CALLS:
            raise SpecError(f"system call {call!r} cannot be denied: the sandbox's own init needs it")
        known = policy.rule(call)
        if not known.origin:
            raise SpecError(f"system call {call!r} cannot be denied: no policy names it; is it spelt right?")
        # What already answers ENOSYS keeps doing so: EPERM would make programs fail that now fall back.
        if known.may_allow:
            rules.append(replace(known, action=REFUSED, cases=(), origin="denied by the caller"))
    return rules


def _sorted(rules: Mapping[str, Rule]) -> tuple[Rule, ...]:
    return tuple(rules[call] for call in sorted(rules))


class _Reader:
    """Checks the parsed file and makes policies of it. Every complaint names the file and the table."""

    def __init__(self, document: dict[str, Any], source: str) -> None:
        self.source = source
        self.where = "the top level"
        self._keys(document, {"version", "constants", "groups", "checks", "policies"})
        if self._take(document, "version", int) != 1:
            raise self._wrong("'version' must be 1, the only format this nsbox reads")
        self.constants = self._take(document, "constants", dict, {})
        self.groups = self._take(document, "groups", dict)
        self.checks = self._take(document, "checks", dict, {})
        self.tables = self._take(document, "policies", dict)

    def policies(self) -> dict[str, Policy]:
        refusals, self.group_rules = self._read_groups()
        self.check_rules = self._read_checks(refusals)
        for rule in self.check_rules.values():
            refusals[rule.call] = Rule(rule.call, REFUSED, (), rule.origin)
        self.allowed: dict[str, dict[str, Rule]] = {}
        policies: dict[str, Policy] = {}
        for name in self.tables:
            rules = self._read_policy(name)
            why = self._take(self.tables[name], "why", str)
            policies[name] = Policy(name, why, _sorted({**refusals, **rules}))
        if not policies:
            raise self._wrong("'policies' is empty")
        return policies

    def _read_groups(self) -> tuple[dict[str, Rule], dict[str, list[Rule]]]:
        """What each grouped call answers where it is not allowed, and each group's allowing rules (none: dangerous)."""
        refusals: dict[str, Rule] = {}
        allowing: dict[str, list[Rule]] = {}
        for name, table in self._tables("groups", self.groups, {"why", "calls", "dangerous", "otherwise"}):
            self._take(table, "why", str)
            otherwise = self._action(self._take(table, "otherwise", str, "EPERM"))
            if otherwise == ALLOW:
                raise self._wrong("'otherwise' is the answer where the group is not allowed; it cannot be ALLOW")
            calls = self._names(table, "calls")
            for call in calls:
                if call in refusals:
                    raise self._wrong(f"call {call!r} is already in group {refusals[call].origin!r}")
                refusals[call] = Rule(call, otherwise, (), name)
            dangerous = self._take(table, "dangerous", bool, False)
            allowing[name] = [] if dangerous else [Rule(call, ALLOW, (), name) for call in calls]
        return refusals, allowing

    def _read_checks(self, grouped: Mapping[str, Rule]) -> dict[str, Rule]:
        rules = {}
        for name, table in self._tables("checks", self.checks, {"why", "call", "cases", "otherwise"}):
            self._take(table, "why", str)
            call = self._take(table, "call", str)
            if call in grouped:
                raise self._wrong(f"call {call!r} is in group {grouped[call].origin!r}: a call is grouped or checked")
            cases = tuple(self._case(case) for case in self._take(table, "cases", list))
            if not cases:
                raise self._wrong("'cases' is empty")
            rules[name] = Rule(call, self._action(self._take(table, "otherwise", str)), cases, name)
        return rules

    def _case(self, table: Any) -> Case:
        self._keys(table, {"when", "answer"})
        tests = tuple(self._test(test) for test in self._take(table, "when", list))
        if not tests:
            raise self._wrong("'when' is empty: use 'otherwise' for what is left")
        if len({test.arg for test in tests}) < len(tests):
            raise self._wrong("'when' tests an argument twice")
        return Case(tests, self._action(self._take(table, "answer", str)))

    def _test(self, table: Any) -> Test:
        self._keys(table, {"arg", "mask", "in"})
        arg = self._take(table, "arg", int)
        if not 0 <= arg <= 5:
            raise self._wrong(f"'arg' is {arg}: system calls have arguments 0 to 5")
        mask = self._number(table.get("mask", WORD))
        values = tuple(dict.fromkeys(self._number(value) for value in self._take(table, "in", list)))
        if not values or not mask:
            raise self._wrong("'in' and 'mask' must not be empty")
        if any(value & ~mask for value in values):
            raise self._wrong("'in' has a value with bits outside 'mask', which can never match")
        return Test(arg, values, mask)

    def _read_policy(self, name: str, above: tuple[str, ...] = ()) -> dict[str, Rule]:
        if name in self.allowed:
            return self.allowed[name]
        if name not in self.tables or name in above:
            raise self._wrong(f"'extends' names {name!r}, which is no policy above it")
        self.where = f"[policies.{name}]"
        table = self.tables[name]
        self._keys(table, {"why", "extends", "groups", "checks"})
        base = self._take(table, "extends", str, "")
        rules = dict(self._read_policy(base, (*above, name))) if base else {}
        self.where = f"[policies.{name}]"
        for group in self._names(table, "groups"):
            if group not in self.group_rules:
                raise self._wrong(f"group {group!r} does not exist")
            if not self.group_rules[group]:
                raise self._wrong(f"group {group!r} is dangerous: no policy may list it")
            rules.update((rule.call, rule) for rule in self.group_rules[group])
        for check in self._names(table, "checks"):
            if check not in self.check_rules:
                raise self._wrong(f"check {check!r} does not exist")
            rules[self.check_rules[check].call] = self.check_rules[check]
        self.allowed[name] = rules
        return rules

    def _tables(self, kind: str, tables: dict[str, Any], keys: set[str]) -> Iterable[tuple[str, dict[str, Any]]]:
        for name, table in tables.items():
            self.where = f"[{kind}.{name}]"
            self._keys(table, keys)
            yield name, table

    def _keys(self, table: Any, known: set[str]) -> None:
        if not isinstance(table, dict):
            raise self._wrong("must be a table")
        if unknown := sorted(set(table) - known):
            raise self._wrong(f"unknown key {unknown[0]!r}: known are {', '.join(sorted(known))}")

    def _take(self, table: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
        value = table.get(key, default)
        if value is None:
            raise self._wrong(f"{key!r} is missing")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._wrong(f"{key!r} must be of type {kind.__name__}")
        return value

    def _names(self, table: dict[str, Any], key: str) -> list[str]:
        names = self._take(table, key, list, [])
        if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
            raise self._wrong(f"{key!r} must be a list of different names")
        return list(names)

    def _number(self, value: Any) -> int:
        number = self.constants.get(value) if isinstance(value, str) else value
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= WORD:
            raise self._wrong(f"{value!r} is neither a 32-bit number nor the name of one in [constants]")
        return number

    def _action(self, name: str) -> int:
        number = getattr(errno, name, None)
        if name == "ALLOW":
            return ALLOW
        if not isinstance(number, int):
            raise self._wrong(f"answer {name!r} is neither ALLOW nor the name of an errno")
        return errno_action(number)

    def _wrong(self, what: str) -> SpecError:
        return SpecError(f"{self.source}: {self.where}: {what}")
