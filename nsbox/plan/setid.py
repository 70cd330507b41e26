"""The variant of a policy for a sandbox with a read-write mount: no set-user-id or set-group-id bit can be made.

Inside, nosuid and no_new_privs make such a bit mean nothing. But a file on a read-write mount belongs to the caller, on
the host, where any other user could execute it: a payload that leaves one behind has given its code the caller's
rights."""

from nsbox.plan.policy import ALLOW, REFUSED, UNKNOWN, Case, Policy, Rule, Test

S_ISUID_S_ISGID = 0o6000
CREATES = 0o20000100  # O_CREAT | __O_TMPFILE: without one of them open(2) does not look at its mode

_MODE_ARGUMENT = {
    "chmod": 1,
    "fchmod": 1,
    "creat": 1,
    "mknod": 1,
    "fchmodat": 2,
    "fchmodat2": 2,
    "mknodat": 2,
    "open": 2,
    "openat": 3,
}


def without_set_id(policy: Policy) -> Policy:
    """The same policy, refusing (EPERM) every call that would set one of the bits; openat2(2), whose mode lies behind a
    pointer, seems not to exist (ENOSYS), so that programs fall back to openat(2)."""
    rules = []
    for call, argument in _MODE_ARGUMENT.items():
        known = policy.rule(call)
        if not known.may_allow:
            continue
        cases = [Case((Test(argument, (0,), S_ISUID_S_ISGID),), ALLOW)]
        if call.startswith("open"):
            cases.insert(0, Case((Test(argument - 1, (0,), CREATES),), ALLOW))
        rules.append(Rule(call, REFUSED, tuple(cases), "set-id bits on a read-write mount"))
    return policy.with_rules([*rules, Rule("openat2", UNKNOWN, (), "set-id bits on a read-write mount")])
