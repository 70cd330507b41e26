"""Policy → the classic BPF program that the kernel runs for every system call.

``compile_filter`` makes a search tree over ranges of call numbers with the same answer. The kernel runs a new filter
once for every number when it is installed, to learn which calls it allows whatever their arguments (those never run
the filter again); a tree makes that cheap, where libseccomp's list of comparisons does not. ``reference`` has
libseccomp compile the same policy: slow to load, but written by others, and the tests prove the two equal.

Everything is emitted backwards, from the last instruction to the first. BPF only jumps forward, so the target of a jump
then always has an address already.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from nsbox.errors import HostError
from nsbox.plan.policy import UNKNOWN, WORD, Case, Policy, Rule, Test

ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of the processors there is support for; libseccomp uses the same tokens. Both are little-endian."""

# Since 5.1 new calls have one number on all processors. These are the ones that a supported libseccomp may not know.
_COMMON_FIRST = 435
_COMMON = """clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2 mount_setattr quotactl_fd
landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret process_mrelease futex_waitv
set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack futex_wake futex_wait futex_requeue statmount listmount
lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal setxattrat getxattrat listxattrat removexattrat
open_tree_attr file_getattr file_setattr"""
NEW_NUMBERS = {call: number for number, call in enumerate(_COMMON.split(), _COMMON_FIRST)}

_LD, _AND, _JA, _RET = 0x20, 0x54, 0x05, 0x06  # BPF_LD|W|ABS, BPF_ALU|AND|K, BPF_JMP|JA, BPF_RET|K
_JEQ, _JGE, _JSET = 0x15, 0x35, 0x45  # BPF_JMP|…|K
_NR, _ARCH, _ARGS = 0, 4, 16  # offsets in struct seccomp_data

_FAR = 253  # a jump reaches 255; two trampolines may still come in between
_CHAIN = 4  # so many exceptions of a range are compared one after the other; more are split in halves

Leaf = int | Rule
Exceptions = list[tuple[int, Leaf]]
Span = tuple[int, Leaf, Exceptions]
Cube = dict[int, tuple[int, int]]


def numbers(policy: Policy, arch: str) -> dict[int, Rule]:
    """The rules of `policy` by call number on `arch`. Calls that `arch` does not have are left out.

    Raises HostError when libseccomp, which knows the numbers, is missing or `arch` is not supported.
    """
    token, pyseccomp = _token(arch), _pyseccomp()
    found: dict[int, Rule] = {}
    for rule in policy.rules:
        number = pyseccomp.resolve_syscall(token, rule.call)
        # Negative: -1 for a name never heard of, less for one that only other processors have.
        number = NEW_NUMBERS.get(rule.call, -1) if number == -1 else number
        if number >= 0:
            found[number] = rule
    return found


def compile_filter(policy: Policy, arch: str) -> bytes:
    """The program of `policy` for `arch`: an array of struct sock_filter. Raises HostError as ``numbers`` does."""
    leaves: dict[int, Leaf] = {nr: rule if rule.cases else rule.action for nr, rule in numbers(policy, arch).items()}
    code = _Code()
    root = _tree(code, _spans(leaves, policy.default))
    body = code.load(_NR, root)
    code.load(_ARCH, code.jump(_JEQ, _token(arch), body, code.answer(UNKNOWN)))
    return code.assembled()


def _spans(leaves: dict[int, Leaf], default: Leaf) -> list[Span]:
    """Ranges of numbers with one answer, as (first number, answer, exceptions): the whole range of u32 in order.

    A single number between two ranges that agree is an exception: one comparison, where two bounds would take two.
    """
    runs: list[tuple[int, Leaf]] = [(0, leaves.get(0, default))]
    for number in sorted({nr for known in leaves for nr in (known, known + 1)}):
        if (leaf := leaves.get(number, default)) != runs[-1][1]:
            runs.append((number, leaf))
    spans: list[Span] = []
    index = 0
    while index < len(runs):
        first, leaf = runs[index]
        exceptions: Exceptions = []
        while (skipped := _singles(runs, index, leaf)) > 0:
            exceptions += runs[index + 1 : index + 1 + skipped]
            index += skipped + 1
        spans.append((first, leaf, exceptions))
        index += 1
    return spans


def _singles(runs: list[tuple[int, Leaf]], index: int, leaf: Leaf) -> int:
    """How many runs of one number each lie between run `index` and the next run that answers `leaf`; 0 if others do."""
    for count in range(1, len(runs) - index - 1):
        if runs[index + count + 1][0] - runs[index + count][0] != 1:
            return 0
        if runs[index + count + 1][1] == leaf:
            return count
    return 0


def _tree(code: "_Code", spans: list[Span]) -> int:
    if len(spans) == 1:
        return _exceptions(code, spans[0][1], spans[0][2])
    middle = len(spans) // 2
    high = _tree(code, spans[middle:])
    return code.jump(_JGE, spans[middle][0], high, _tree(code, spans[:middle]))


def _exceptions(code: "_Code", leaf: Leaf, exceptions: Exceptions) -> int:
    if len(exceptions) > _CHAIN:
        middle = len(exceptions) // 2
        high = _exceptions(code, leaf, exceptions[middle:])
        return code.jump(_JGE, exceptions[middle][0], high, _exceptions(code, leaf, exceptions[:middle]))
    label = code.answer(leaf)
    for number, other in reversed(exceptions):
        label = code.jump(_JEQ, number, code.answer(other), label)
    return label


@dataclass(slots=True)
class _Entry:
    """Where a case begins: `cold` loads the argument first, at `warm` the accumulator holds `held` already."""

    cold: int
    test: Test | None = None
    held: tuple[int, int] | None = None
    warm: int = -1


@dataclass(slots=True)
class _Code:
    """Instructions, last first. A label is an instruction's distance from the end."""

    backwards: list[tuple[int, int, int, int]] = field(default_factory=list)
    answers: dict[Leaf, int] = field(default_factory=dict)

    def emit(self, code: int, k: int, yes: int = 0, no: int = 0) -> int:
        self.backwards.append((code, yes, no, k))
        return len(self.backwards) - 1

    def near(self, label: int) -> int:
        """`label`, or a trampoline to it when it is out of the reach of an 8-bit jump."""
        distance = len(self.backwards) - 1 - label
        return label if distance < _FAR else self.emit(_JA, distance)

    def jump(self, code: int, k: int, yes: int, no: int) -> int:
        yes, no = self.near(yes), self.near(no)
        here = len(self.backwards) - 1
        return self.emit(code, k, here - yes, here - no)

    def load(self, offset: int, then: int) -> int:
        if then != len(self.backwards) - 1:
            self.emit(_JA, len(self.backwards) - 1 - then)
        return self.emit(_LD, offset)

    def answer(self, leaf: Leaf) -> int:
        if leaf not in self.answers:
            self.answers[leaf] = self.emit(_RET, leaf) if isinstance(leaf, int) else self._cases(leaf)
        return self.answers[leaf]

    def _cases(self, rule: Rule) -> int:
        for action in (rule.action, *(case.action for case in rule.cases)):
            self.answer(action)
        later = [_Entry(self.answer(rule.action))]
        for case in reversed(rule.cases):
            later.insert(0, self._case(case, later))
        return later[0].cold

    def _case(self, case: Case, later: list[_Entry]) -> _Entry:
        entry = _Entry(self.answer(case.action))
        for test in reversed(case.tests):
            # A single bit test spares the AND, and leaves the whole argument in the accumulator.
            bits = test.mask != WORD and test.values == (0,)
            held = (test.arg, WORD if bits else test.mask)
            # Whoever fails this test also fails later cases that begin with it.
            other = next(entry for entry in later if entry.test != test)
            entry = self._test(test, bits, entry.cold, other.warm if other.held == held else other.cold)
            entry.test, entry.held = test, held
        return entry

    def _test(self, test: Test, bits: bool, holds: int, fails: int) -> _Entry:
        if bits:
            warm = self.jump(_JSET, test.mask, fails, holds)
        else:
            warm = fails
            for value in reversed(test.values):
                warm = self.jump(_JEQ, value, holds, warm)
        masked = bits or test.mask == WORD
        # The low half of a 64-bit argument comes first on a little-endian machine.
        return _Entry(self.load(_ARGS + 8 * test.arg, warm if masked else self.emit(_AND, test.mask)), warm=warm)

    def assembled(self) -> bytes:
        return b"".join(struct.pack("=HBBI", *instruction) for instruction in reversed(self.backwards))


def reference(policy: Policy, arch: str) -> bytes:
    """The same policy compiled by libseccomp. Raises HostError as ``numbers`` does, OSError if libseccomp refuses.

    On a foreign `arch` the calls of ``untranslatable`` are missing from it.
    """
    token, pyseccomp = _token(arch), _pyseccomp()
    filter_ = pyseccomp.SyscallFilter(policy.default)
    filter_.set_attr(pyseccomp.Attr.ACT_BADARCH, UNKNOWN)
    native = pyseccomp.system_arch()
    if token != native:
        filter_.add_arch(token)
        filter_.remove_arch(native)
    omitted = untranslatable(policy, arch)
    for number, rule in numbers(policy, arch).items():
        if rule.call in omitted:
            continue
        # libseccomp takes the native number, or its stand-in, and translates by name; a name it lacks it takes as is.
        given = pyseccomp.resolve_syscall(native, rule.call)
        for action, cube in _cubes(rule):
            if action != policy.default:
                tests = [pyseccomp.Arg(arg, pyseccomp.MASKED_EQ, *test) for arg, test in sorted(cube.items())]
                filter_.add_rule_exactly(action, number if given == -1 else given, *tests)
    with open(os.memfd_create("nsbox-reference"), "w+b") as file:
        filter_.export_bpf(file)
        file.seek(0)
        return file.read()


def untranslatable(policy: Policy, arch: str) -> frozenset[str]:
    """The calls of `policy` newer than libseccomp, which it cannot be told of for another processor than its own."""
    pyseccomp = _pyseccomp()
    if _token(arch) == pyseccomp.system_arch():
        return frozenset()
    return frozenset(rule.call for rule in policy.rules if pyseccomp.resolve_syscall(_token(arch), rule.call) == -1)


def _cubes(rule: Rule) -> Iterator[tuple[int, Cube]]:
    """`rule` as disjoint regions {argument: (mask, value)} with their actions, together all there is.

    libseccomp has no "otherwise" for a call whose arguments it compares, and no "masked and different", so what is left
    over is cut up bit by bit.
    """
    left: list[Cube] = [{}]
    for case in rule.cases:
        for values in product(*(test.values for test in case.tests)):
            wanted = {test.arg: (test.mask, value) for test, value in zip(case.tests, values, strict=True)}
            rest: list[Cube] = []
            for cube in left:
                inside, outside = _cut(cube, wanted)
                rest += outside
                if inside is not None:
                    yield case.action, inside
            left = rest
    for cube in left:
        yield rule.action, cube


def _cut(cube: Cube, knife: Cube) -> tuple[Cube | None, list[Cube]]:
    """The part of `cube` within `knife`, if any, and disjoint cubes that make up the rest."""
    inside, outside = dict(cube), []
    for arg, (mask, value) in knife.items():
        for bit in (1 << position for position in reversed(range(32)) if mask >> position & 1):
            known, bits = inside.get(arg, (0, 0))
            if not known & bit:
                outside.append({**inside, arg: (known | bit, bits | (bit & ~value))})
                inside[arg] = (known | bit, bits | (bit & value))
            elif (bits ^ value) & bit:
                return None, [cube]
    return inside, outside


def _token(arch: str) -> int:
    if arch not in ARCHES:
        raise HostError(f"no system-call filter for processor {arch!r}: supported are {', '.join(ARCHES)}")
    return ARCHES[arch]


def _pyseccomp() -> Any:
    try:
        import pyseccomp
    except ImportError as error:
        remedy = "pip install pyseccomp, or pip install --force-reinstall nsbox"
        raise HostError(f"cannot compile a seccomp filter: {error}", remedy=remedy) from error
    except (RuntimeError, OSError) as error:
        # pyseccomp looks for the shared library when it is imported.
        remedy = "install it: apt install libseccomp2"
        raise HostError("cannot compile a seccomp filter: libseccomp.so.2 is not found", remedy=remedy) from error
    return pyseccomp
