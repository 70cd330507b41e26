"""Seccomp: the search tree answers exactly as libseccomp's own program does, and the policies keep their promises.

Programs are interpreted here, so neither privilege nor a particular processor is needed; one test loads them for real.
"""

import ctypes
import errno
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import pytest

from nsbox.errors import HostError, SpecError
from nsbox.plan import filter as cached
from nsbox.plan.bpf import ARCHES, NEW_NUMBERS, compile_filter, numbers, reference, untranslatable
from nsbox.plan.policy import (
    ALLOW,
    INIT_CALLS,
    REFUSED,
    UNKNOWN,
    WORD,
    Case,
    Policy,
    Rule,
    Test,
    customised,
    errno_action,
    load_policies,
    parse_policies,
)
from nsbox.plan.setid import without_set_id

POLICIES = load_policies()
NAMES = ("strict", "default", "permissive")
EVERY = pytest.mark.parametrize(("name", "arch"), list(product(NAMES, ARCHES)))
NATIVE = os.uname().machine
X32 = 0x40000000
HIGH = 0xDEADBEEF << 32

NEVER = """
clone3 io_uring_setup io_uring_enter io_uring_register bpf perf_event_open userfaultfd kexec_load
kexec_file_load init_module finit_module delete_module add_key request_key keyctl mount umount2 pivot_root chroot fsopen
fsconfig fsmount fspick move_mount open_tree open_tree_attr mount_setattr open_by_handle_at unshare setns pidfd_getfd
kcmp process_madvise move_pages migrate_pages settimeofday clock_settime adjtimex clock_adjtime sethostname
setdomainname reboot swapon swapoff quotactl quotactl_fd acct iopl ioperm modify_ldt nfsservctl lookup_dcookie
fanotify_init memfd_secret vhangup syslog
"""

Instruction = tuple[int, int, int, int]


def decode(program: bytes) -> list[Instruction]:
    return list(struct.iter_unpack("=HBBI", program))


def run(program: list[Instruction], arch: int, number: int, args: tuple[int, ...] = (0,) * 6) -> int:
    """What `program` answers; the subset of classic BPF that seccomp programs are made of."""
    data = struct.unpack("<16I", struct.pack("<IIQ6Q", number & WORD, arch, 0x7FFF00001234, *args))
    position = accumulator = 0
    scratch = [0] * 16
    while True:
        code, yes, no, k = program[position]
        position += 1
        match code:
            case 0x20:  # load from seccomp_data
                accumulator = data[k // 4]
            case 0x54:  # and
                accumulator &= k
            case 0x05:  # jump
                position += k
            case 0x15:
                position += yes if accumulator == k else no
            case 0x25:
                position += yes if accumulator > k else no
            case 0x35:
                position += yes if accumulator >= k else no
            case 0x45:
                position += yes if accumulator & k else no
            case 0x06:  # return
                return k
            case 0x02:  # store
                scratch[k] = accumulator
            case 0x60:  # load from scratch
                accumulator = scratch[k]
            case _:
                raise AssertionError(f"instruction {code:#x}")


def numbers_worth_trying() -> list[int]:
    edges = [2**bit + delta for bit in (9, 10, 12, 16, 29, 30, 31) for delta in (-1, 0, 1)]
    return [*range(-1, 601), *range(1000, 1005), *range(X32, X32 + 601), *edges, WORD - 1, WORD]


def argument_grid(rule: Rule) -> Iterator[tuple[int, ...]]:
    """Combinations of values on, beside and above those that any case of `rule` looks at."""
    interesting: list[list[int]] = []
    for position in range(6):
        tests = [test for case in rule.cases for test in case.tests if test.arg == position]
        if not tests:
            interesting.append([0])
            continue
        exact = {value for test in tests for value in test.values}
        near = {value ^ bit for value in exact for bit in (1, 0x80)} | {0, 1, 3, 4, 5, 10, 16, 17, 40, WORD}
        masks = {test.mask for test in tests if test.mask != WORD}
        apart = {1 << bit for bit in range(32)} if masks or len(rule.cases) == 1 else {0x800, 0x80000, 0x80800, 1 << 31}
        flagged = {value | 0x80800 for value in exact} if masks else set()
        low = exact | near | apart | flagged | {WORD ^ mask for mask in masks}
        interesting.append(sorted(low) + [value | HIGH for value in sorted(exact)] + [HIGH, 1 << 32])
    yield from product(*interesting)


@cache
def programs(name: str, arch: str) -> tuple[list[Instruction], list[Instruction], Policy]:
    """The tree, libseccomp's program, and the policy that both were made of."""
    policy = POLICIES[name].without(untranslatable(POLICIES[name], arch))
    return decode(compile_filter(policy, arch)), decode(reference(policy, arch)), policy


def answer(name: str, call: str, *args: int) -> int:
    """The answer to `call` of the filter that is really used, on this machine's processor."""
    number = next(nr for nr, rule in numbers(POLICIES[name], NATIVE).items() if rule.call == call)
    return run(decode(compile_filter(POLICIES[name], NATIVE)), ARCHES[NATIVE], number, (*args, *(0,) * (6 - len(args))))


@EVERY
def test_tree_equals_libseccomp_for_every_number(name: str, arch: str) -> None:
    tree, theirs, policy = programs(name, arch)
    known = numbers(policy, arch)
    for number in numbers_worth_trying():
        got = run(tree, ARCHES[arch], number)
        assert got == run(theirs, ARCHES[arch], number), number
        rule = known.get(number, Rule("", policy.default))
        assert got == rule.answer((0,) * 6), (number, rule)


@EVERY
def test_tree_equals_libseccomp_for_arguments(name: str, arch: str) -> None:
    tree, theirs, policy = programs(name, arch)
    tried = {}
    for number, rule in numbers(policy, arch).items():
        if not rule.cases:
            continue
        answers = set()
        for args in argument_grid(rule):
            got = run(tree, ARCHES[arch], number, args)
            assert got == run(theirs, ARCHES[arch], number, args), (rule.call, args)
            assert got == rule.answer(args), (rule.call, args)
            answers.add(got)
        tried[rule.call] = answers
    assert set(tried) == {"clone", "prlimit64", "fcntl", "socket", "socketpair", "ioctl", "prctl", "personality"}
    assert all(len(answers) > 1 for answers in tried.values()), "the grid meets every side of every check"


@EVERY
def test_the_variant_without_set_id_bits(name: str, arch: str) -> None:
    """For sandboxes with a read-write mount: equal to libseccomp's, and no call can set S_ISUID or S_ISGID."""
    policy = without_set_id(POLICIES[name])
    policy = policy.without(untranslatable(policy, arch))
    tree, theirs = decode(compile_filter(policy, arch)), decode(reference(policy, arch))
    for number, rule in numbers(policy, arch).items():
        for args in argument_grid(rule) if rule.origin.startswith("set-id") else ():
            got = run(tree, ARCHES[arch], number, args)
            assert got == run(theirs, ARCHES[arch], number, args) == rule.answer(args), (rule.call, args)
    for call, at in {"fchmod": 1, "fchmodat": 2, "mknodat": 2, "openat": 3, "fchmodat2": 2}.items():
        number = next((nr for nr, rule in numbers(policy, arch).items() if rule.call == call), None)
        if number is None or not policy.rule(call).may_allow:
            continue
        flags = {2: 0o100} if call == "openat" else {}
        for mode, refused in ((0o755, False), (0o1777, False), (0o4755, True), (0o2755, True), (0o6000, True)):
            args = [0] * 6
            args[at] = mode
            for index, value in flags.items():
                args[index] = value
            assert (run(tree, ARCHES[arch], number, tuple(args)) != ALLOW) is refused, (call, oct(mode))
    assert run(tree, ARCHES[arch], 437) == UNKNOWN  # openat2(2): its mode lies behind a pointer


@EVERY
def test_upper_half_of_arguments_changes_nothing(name: str, arch: str) -> None:
    tree, _, policy = programs(name, arch)
    for number, rule in numbers(policy, arch).items():
        for args in argument_grid(rule) if rule.cases else ():
            low = tuple(arg & WORD for arg in args)
            assert run(tree, ARCHES[arch], number, args) == run(tree, ARCHES[arch], number, low), (rule.call, args)


@pytest.mark.parametrize("name", NAMES)
def test_new_calls_answer_alike_on_all_processors(name: str) -> None:
    trees = {arch: decode(compile_filter(POLICIES[name], arch)) for arch in ARCHES}
    for number in range(424, 600):
        answers = {arch: run(tree, ARCHES[arch], number) for arch, tree in trees.items()}
        assert len(set(answers.values())) == 1, (number, answers)


def test_own_numbers_agree_with_libseccomp() -> None:
    import pyseccomp

    for call, number in NEW_NUMBERS.items():
        assert pyseccomp.resolve_syscall(pyseccomp.system_arch(), call) in (number, -1), call


@EVERY
def test_foreign_architecture_and_x32_answer_enosys(name: str, arch: str) -> None:
    tree, theirs, _ = programs(name, arch)
    others = [0x40000003, 0x40000028, 0, WORD, *(token for other, token in ARCHES.items() if other != arch)]
    for number, token in product(range(-1, 500), others):
        assert run(tree, token, number) == run(theirs, token, number) == UNKNOWN
    for number in range(X32, X32 + 600):
        assert run(tree, ARCHES[arch], number) == UNKNOWN


def test_policies_are_ordered() -> None:
    assert tuple(POLICIES) == NAMES
    for less, more in pairwise(NAMES):
        for rule in POLICIES[less].rules:
            wider = POLICIES[more].rule(rule.call)
            for args in argument_grid(Rule("", ALLOW, (*rule.cases, *wider.cases))):
                assert rule.answer(args) != ALLOW or wider.answer(args) == ALLOW, (less, more, rule.call, args)
    sizes = [sum(rule.may_allow for rule in policy.rules) for policy in POLICIES.values()]
    assert sizes == sorted(set(sizes))


@EVERY
def test_dangerous_calls_are_never_allowed(name: str, arch: str) -> None:
    tree = decode(compile_filter(POLICIES[name], arch))
    for call in NEVER.split():
        rule = POLICIES[name].rule(call)
        assert rule.origin, f"{call} is not named in seccomp.toml"
        assert rule.action in (REFUSED, UNKNOWN)
        assert not rule.cases
    for number, rule in numbers(POLICIES[name], arch).items():
        if rule.call in NEVER.split():
            assert run(tree, ARCHES[arch], number) == rule.action


@pytest.mark.parametrize("name", NAMES)
def test_calls_behind_a_pointer_do_not_exist(name: str) -> None:
    for call in ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register"):
        assert answer(name, call) == UNKNOWN


@EVERY
def test_init_can_do_its_work(name: str, arch: str) -> None:
    tree = decode(compile_filter(POLICIES[name], arch))
    known = {rule.call: number for number, rule in numbers(POLICIES[name], arch).items()}
    clone_vm, clone_vfork, sigchld, tiocsctty, pr_set_pdeathsig = 0x100, 0x4000, 17, 0x540E, 1
    first = {"clone": clone_vm | clone_vfork | sigchld, "prctl": pr_set_pdeathsig}
    for call in INIT_CALLS:
        args = (first.get(call, 0), tiocsctty, 0, 0, 0, 0)
        assert run(tree, ARCHES[arch], known[call], args) == ALLOW, call


@pytest.mark.parametrize("name", NAMES)
def test_clone_makes_no_namespace(name: str) -> None:
    thread = 0x003D0F00
    assert answer(name, "clone", thread) == answer(name, "clone", thread | HIGH) == ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer(name, "clone", flag | 17) == answer(name, "clone", flag | 17 | HIGH) == REFUSED


@pytest.mark.parametrize("name", NAMES)
def test_sockets_by_family_type_and_protocol(name: str) -> None:
    flags = 0x80800
    for family, kind, protocol in product((1, 2, 10), (1, 2), (0,)):
        assert answer(name, "socket", family, kind | flags, protocol) == ALLOW
    families = {"vsock": 40, "alg": 38, "packet": 17, "xdp": 44, "bluetooth": 31, "can": 29, "rds": 21, "unspec": 0}
    for family in families.values():
        assert answer(name, "socket", family, 2) == answer(name, "socket", family | HIGH, 3) != ALLOW
    for family, kind in product((2, 10), (3, 4, 5, 6, 10)):
        assert answer(name, "socket", family, kind | flags, 1) == errno_action(errno.EPROTONOSUPPORT)
    sctp, mptcp, netfilter, audit = 132, 262, 12, 9
    for protocol in (sctp, mptcp):
        assert answer(name, "socket", 2, 1, protocol) == errno_action(errno.EPROTONOSUPPORT)
    assert answer(name, "socket", 16, 3, netfilter) == answer(name, "socket", 16, 3, audit) != ALLOW
    assert (answer(name, "socket", 16, 3 | flags, 0) == ALLOW) is (name != "strict")
    assert answer(name, "socketpair", 1, 1) == ALLOW != answer(name, "socketpair", 2, 1)


@pytest.mark.parametrize("name", NAMES)
def test_terminal_and_personality(name: str) -> None:
    for request in (0x5412, 0x541C, 0x541D, 0x5423):
        assert answer(name, "ioctl", 0, request) == answer(name, "ioctl", 0, request | HIGH) == REFUSED
    for request in (0x5401, 0x5413, 0x540E, 0x5421):  # TCGETS TIOCGWINSZ TIOCSCTTY FIONBIO
        assert answer(name, "ioctl", 0, request) == ALLOW
    for persona in (0, 8, 0x20000, 0x20008, WORD, WORD | HIGH):
        assert answer(name, "personality", persona) == ALLOW
    assert answer(name, "personality", 0x400000) == answer(name, "personality", 0x440000) == REFUSED
    assert (answer(name, "personality", 0x40000) == ALLOW) is (name == "permissive")


def test_tracing_is_permissive_only() -> None:
    for call in ("ptrace", "process_vm_readv", "process_vm_writev"):
        assert [answer(name, call) for name in NAMES] == [REFUSED, REFUSED, ALLOW]


def test_ordinary_calls_are_allowed_by_default() -> None:
    wanted = """rseq membarrier set_robust_list memfd_create pidfd_open pidfd_send_signal waitid sched_setaffinity
    copy_file_range statx faccessat2 close_range openat2 epoll_pwait2 futex_waitv cachestat mseal fchmodat2 setxattrat
    map_shadow_stack mknodat setgroups fchownat mlock timer_create inotify_init1 shmget mq_open splice vmsplice mbind
    seccomp landlock_restrict_self signalfd4 eventfd2 timerfd_create sysinfo getcpu sendfile"""
    assert [call for call in wanted.split() if POLICIES["default"].rule(call).action != ALLOW] == []


def test_every_name_exists_on_some_processor() -> None:
    everywhere = {rule.call for arch in ARCHES for rule in numbers(POLICIES["default"], arch).values()}
    assert {rule.call for rule in POLICIES["default"].rules} - everywhere == set()


@EVERY
def test_program_is_short(name: str, arch: str) -> None:
    tree, theirs, _ = programs(name, arch)
    assert len(tree) < 150 < len(theirs)


def test_long_jumps() -> None:
    """Every second number has an answer of its own kind, and so have the arguments: nothing is near anything."""
    names = [rule.call for rule in POLICIES["permissive"].rules]
    tests = [Case((Test(index % 6, (index,)),), errno_action(index % 100 + 1)) for index in range(300)]
    rules = tuple(
        Rule(call, errno_action(index % 50 + 1), (*tests[index % 7 :: 40], Case((Test(1, (index,)),), ALLOW)))
        for index, call in enumerate(names)
    )
    # Comparisons in a row with one target: the distance to it takes every value around the reach of a jump.
    row = Rule("read", UNKNOWN, (Case((Test(0, tuple(range(1000, 1600))), Test(1, (3,))), REFUSED),))
    policy = Policy("long", "", rules).with_rules([row])
    tree, known = decode(compile_filter(policy, "x86_64")), numbers(policy, "x86_64")
    assert len(tree) > 3000
    for number in range(500):
        rule = known.get(number, Rule("", UNKNOWN))
        for value in (0, 1, 7, 41, 83, 127, *(test.values[0] for case in rule.cases for test in case.tests)):
            args = (value,) * 6
            assert run(tree, ARCHES["x86_64"], number, args) == rule.answer(args), (number, value)
    for value in range(990, 1610):
        args = (value, 3, 0, 0, 0, 0)
        assert run(tree, ARCHES["x86_64"], 0, args) == row.answer(args), value


# --- the file ---------------------------------------------------------------------------------------------------------

SMALL = """
version = 1
[constants]
ONE = 1
[groups.a]
why = "x"
calls = ["read", "write"]
[groups.b]
why = "x"
dangerous = true
otherwise = "ENOSYS"
calls = ["bpf"]
[checks.c]
call = "ioctl"
why = "x"
cases = [{ when = [{ arg = 1, mask = 0xff, in = ["ONE", 2] }], answer = "EPERM" }]
otherwise = "ALLOW"
[policies.p]
why = "x"
groups = ["a"]
[policies.q]
why = "x"
extends = "p"
checks = ["c"]
"""


def test_small_file() -> None:
    policies = parse_policies(SMALL.encode())
    assert [rule.call for rule in policies["p"].rules] == ["bpf", "ioctl", "read", "write"]
    assert policies["p"].rule("ioctl") == Rule("ioctl", REFUSED, (), "c")
    assert policies["q"].rule("ioctl").cases == (Case((Test(1, (1, 2), 0xFF),), REFUSED),)
    assert policies["q"].rule("bpf").action == policies["q"].rule("unheard_of").action == UNKNOWN


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("version = 1", "version = 2", "'version' must be 1"),
        ("version = 1", "", "'version' is missing"),
        ("version = 1", "version = true", "'version' must be of type int"),
        ("version = 1", "version = ", "not valid TOML"),
        ("version = 1", "version = 1\nmore = 1", "unknown key 'more'"),
        ('calls = ["bpf"]', 'calls = ["bpf", "read"]', "[groups.b]: call 'read' is already in group 'a'"),
        ('calls = ["bpf"]', 'calls = ["ioctl"]', "[checks.c]: call 'ioctl' is in group 'b'"),
        ('calls = ["bpf"]', "calls = [7]", "[groups.b]: 'calls' must be a list of different names"),
        ('calls = ["bpf"]', 'calls = "bpf"', "[groups.b]: 'calls' must be of type list"),
        ('otherwise = "ENOSYS"', 'otherwise = "ENOSUCH"', "answer 'ENOSUCH' is neither ALLOW nor the name of an errno"),
        ('otherwise = "ENOSYS"', 'otherwise = "ALLOW"', "cannot be ALLOW"),
        ('otherwise = "ENOSYS"', 'otherwise = "errorcode"', "neither ALLOW nor the name"),
        ('groups = ["a"]', 'groups = ["b"]', "[policies.p]: group 'b' is dangerous"),
        ('groups = ["a"]', 'groups = ["z"]', "[policies.p]: group 'z' does not exist"),
        ('checks = ["c"]', 'checks = ["z"]', "[policies.q]: check 'z' does not exist"),
        ('extends = "p"', 'extends = "q"', "'extends' names 'q'"),
        ('extends = "p"', 'extends = "r"', "'extends' names 'r'"),
        ("arg = 1", "arg = 6", "'arg' is 6"),
        ("mask = 0xff", "mask = 0x1ffffffff", "neither a 32-bit number"),
        ("mask = 0xff", "mask = 0x2", "bits outside 'mask'"),
        ('"ONE", 2', '"TWO", 2', "'TWO' is neither"),
        ('"ONE", 2', "", "must not be empty"),
        ('answer = "EPERM"', 'reply = "EPERM"', "unknown key 'reply'"),
        ('why = "x"\nextends', "extends", "'why' is missing"),
    ],
)
def test_malformed_file(old: str, new: str, complaint: str) -> None:
    assert old in SMALL
    with pytest.raises(SpecError) as caught:
        parse_policies(SMALL.replace(old, new, 1).encode(), "some.toml")
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("some.toml: ")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot read .*none\.toml: No such file"):
        load_policies(tmp_path / "none.toml")


def test_customised() -> None:
    policy = customised(POLICIES, "default", ["ptrace", "personality"], ["socket", "io_uring_setup"])
    assert policy.rule("ptrace").action == ALLOW
    assert policy.rule("personality").answer((0x40000, 0, 0, 0, 0, 0)) == ALLOW
    assert policy.rule("socket").answer((1, 1, 0, 0, 0, 0)) == REFUSED
    assert policy.rule("io_uring_setup").action == UNKNOWN


@pytest.mark.parametrize(
    ("name", "allow", "deny", "complaint"),
    [
        ("lax", (), (), "unknown seccomp policy 'lax': choose one of strict, default, permissive"),
        ("default", ("bpf",), (), "'bpf' cannot be allowed: it is in the dangerous group 'kernel-code'"),
        ("default", ("clone3",), (), "'clone3' cannot be allowed"),
        ("default", ("raed",), (), "is it spelt right"),
        ("default", (), ("raed",), "is it spelt right"),
        ("default", (), ("execve",), "init needs it"),
    ],
)
def test_customised_wrongly(name: str, allow: tuple[str, ...], deny: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(SpecError) as caught:
        cached.cached_filter(name, None, allow, deny)
    assert complaint in str(caught.value)


def test_unsupported_processor() -> None:
    with pytest.raises(HostError, match="no system-call filter for processor 'vax'"):
        cached.cached_filter("default", "vax")


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cached, "_memory", {})
    return tmp_path / "cache"


def forget_and_fail_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(*_: object) -> bytes:
        raise AssertionError("compiled instead of read")

    monkeypatch.setattr(cached, "_memory", {})
    monkeypatch.setattr(cached, "_compile", compile_nothing)


def test_cache_hit(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = cached.cached_filter("default")
    assert program == compile_filter(POLICIES["default"], NATIVE)
    (entry,) = (cache_home / "nsbox").iterdir()
    assert entry.stat().st_mode & 0o7777 == 0o600
    assert entry.parent.stat().st_mode & 0o7777 == 0o700
    forget_and_fail_to_compile(monkeypatch)
    assert cached.cached_filter("default") == program


def spoil_mode(entry: Path) -> None:
    entry.chmod(0o620)


def spoil_tail(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-16])


def spoil_program(entry: Path) -> None:
    content = bytearray(entry.read_bytes())
    content[-20] ^= 1
    entry.write_bytes(bytes(content))


def spoil_key(entry: Path) -> None:
    entry.write_bytes(b"x" + entry.read_bytes()[1:])


def spoil_kind(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


def spoil_link(entry: Path) -> None:
    entry.rename(entry.with_name("elsewhere"))
    entry.symlink_to("elsewhere")


def spoil_directory(entry: Path) -> None:
    entry.parent.chmod(0o777)


def spoil_owner(entry: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(entry, 12345, -1)


@pytest.mark.parametrize(
    "spoil",
    [spoil_mode, spoil_tail, spoil_program, spoil_key, spoil_kind, spoil_link, spoil_directory, spoil_owner],
)
def test_cache_distrusts(spoil: Callable[[Path], None], cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = cached.cached_filter("default")
    (entry,) = (cache_home / "nsbox").iterdir()
    spoil(entry)
    monkeypatch.setattr(cached, "_memory", {})
    marker = b"compiled"
    monkeypatch.setattr(cached, "_compile", lambda *_: marker)
    assert cached.cached_filter("default") == marker != program


def test_cache_tells_requests_apart(cache_home: Path) -> None:
    requests: list[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = [
        ("strict", "x86_64", (), ()),
        ("default", "x86_64", (), ()),
        ("default", "aarch64", (), ()),
        ("default", "x86_64", ("ptrace",), ()),
        ("default", "x86_64", (), ("splice",)),
    ]
    assert len({cached.cached_filter(*request) for request in requests}) == len(requests)
    assert len(list((cache_home / "nsbox").iterdir())) == len(requests)


def test_no_home_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(cached, "_memory", {})
    assert cached.cached_filter("strict") == compile_filter(POLICIES["strict"], NATIVE)


def test_foreign_home_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        pytest.skip("only root can make another user's home")
    os.chown(tmp_path, 12345, 12345)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cached, "_memory", {})
    cached.cached_filter("strict")
    assert list(tmp_path.iterdir()) == []


def test_hit_imports_nothing_heavy(cache_home: Path) -> None:
    cached.cached_filter("default")
    code = (
        "import sys; from nsbox.plan.filter import cached_filter; assert cached_filter('default');"
        "heavy = {'pyseccomp', 'tomllib', 'dataclasses', 'ctypes', 'subprocess', 'hashlib'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": str(cache_home)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_missing_libseccomp(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes.util

    monkeypatch.delitem(sys.modules, "pyseccomp", raising=False)
    find = ctypes.util.find_library
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None if name == "seccomp" else find(name))
    with pytest.raises(HostError, match="apt install libseccomp2"):
        compile_filter(POLICIES["default"], NATIVE)
    monkeypatch.delitem(sys.modules, "pyseccomp", raising=False)


# --- the kernel -------------------------------------------------------------------------------------------------------


def in_filtered_child(program: bytes, body: Callable[[Callable[..., int]], bool]) -> bool:
    """Whether `body` says so in a child that has loaded `program`; it gets a syscall function (-errno on failure)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    instructions = ctypes.create_string_buffer(program, len(program))
    descriptor = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions)))

    def call(number: int, *args: int) -> int:
        result = int(libc.syscall(ctypes.c_long(number), *(ctypes.c_ulong(arg) for arg in args)))
        return -ctypes.get_errno() if result == -1 else result

    seccomp = next(nr for nr, rule in numbers(POLICIES["default"], NATIVE).items() if rule.call == "seccomp")
    child = os.fork()
    if child == 0:
        status = 99
        try:
            libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
            if call(seccomp, 1, 0, ctypes.addressof(descriptor)) == 0:  # SECCOMP_SET_MODE_FILTER
                status = 0 if body(call) else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(NATIVE not in ARCHES, reason=f"no filter for {NATIVE}")
@pytest.mark.parametrize("name", NAMES)
def test_kernel_takes_it(name: str) -> None:
    number = {rule.call: nr for nr, rule in numbers(POLICIES[name], NATIVE).items()}
    getpid, personality = number["getpid"], number["personality"]

    def body(call: Callable[..., int]) -> bool:
        return (
            call(getpid) == os.getpid()
            and call(number["bpf"], 0, 0, 0) == -errno.EPERM
            and call(number["unshare"], 0) == -errno.EPERM
            and call(number["clone3"], 0, 0) == -errno.ENOSYS
            and call(number["io_uring_setup"], 0, 0) == -errno.ENOSYS
            and call(5000) == call(X32 | getpid) == -errno.ENOSYS
            and call(number["clone"], 0x10000000 | 17, 0, 0, 0, 0) == -errno.EPERM
            and call(number["socket"], 40, 1, 0) == -errno.EAFNOSUPPORT
            and call(number["socket"], 1, 1 | 0x80000, 0) >= 0
            and call(number["ioctl"], 0, 0x5412 | HIGH, 0) == -errno.EPERM
            and call(personality, 0x40000 | 0x400000) == -errno.EPERM
            and call(personality, WORD) >= 0
        )

    assert in_filtered_child(compile_filter(POLICIES[name], NATIVE), body)
    assert not in_filtered_child(compile_filter(POLICIES[name], NATIVE), lambda call: call(getpid) < 0)
