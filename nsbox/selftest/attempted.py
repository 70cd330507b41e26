"""What each attempt of the program must come to: outside, so that it means something, and inside, so that it failed.

The answers hold under every profile; where a policy lets something through on purpose, ``LET_THROUGH`` says so.
"""

from typing import NamedTuple

WORKS = ("done",)
#: The call is there and looks at its arguments; what it lacks outside is a right or an object, not the call itself.
EXISTS = (
    *("done", "EPERM", "EACCES", "EINVAL", "EBADF", "ENOENT", "ENOTTY", "ENOKEY", "ENOTSUP", "EFAULT", "ENOEXEC"),
    *("ENODEV", "ENETDOWN", "EROFS", "EBUSY", "empty", "EIO", "ENXIO"),
)
#: What a kernel without the call, the family or the protocol says to everybody: there is nothing to attack.
ABSENT = ("ENOSYS", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT")
#: whom an attempt is of use to: anybody, or only who is root inside
_REFUSED = ("EPERM",)
_CLOSED = ("EPERM", "EACCES")
_NOT_THERE = ("ENOENT", "EACCES", "EPERM", "EROFS", "empty", "covered")
_NO_SOCKET = ("EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "EPERM")
_NAMESPACES = ("user", "mnt", "net", "pid", "ipc", "uts", "cgroup")


class Attempt(NamedTuple):
    """One attempt of the program: what the control must come to, and what shows that it failed inside."""

    threat: str
    name: str
    shows: tuple[str, ...] = EXISTS
    stopped: tuple[str, ...] = _REFUSED


def _each(threat: str, names: str, shows: tuple[str, ...], stopped: tuple[str, ...]) -> list[Attempt]:
    return [Attempt(threat, name, shows, stopped) for name in names.split()]


_SIGSYS = ("not executed", "signal 31")
ATTEMPTS = (
    *_each("K01", "io_uring_setup io_uring_enter io_uring_register", EXISTS, ("ENOSYS",)),
    Attempt("K02", "int_0x80", WORKS, _SIGSYS),
    Attempt("K03", "x32_number", ("done", "not executed"), _SIGSYS),
    Attempt("K03", "high_half_number", WORKS, ("EPERM", "ENOSYS")),
    Attempt("K04", "clone3_namespaces", WORKS, ("ENOSYS",)),
    *(Attempt("K05", f"{how}_{kind}", WORKS) for how in ("unshare", "clone", "clone_high") for kind in _NAMESPACES),
    *_each("K05", "unshare_time unshare_high", EXISTS, _REFUSED),
    *(Attempt("K06", f"setns_{kind}") for kind in (*_NAMESPACES[1:], "pidfd")),
    *_each("K07", "bpf perf_event_open userfaultfd kexec_load init_module finit_module", EXISTS, _REFUSED),
    *_each("K07", "delete_module memfd_secret syslog", EXISTS, _REFUSED),
    *_each("K08", "add_key request_key keyctl keyctl_session", EXISTS, _REFUSED),
    *_each("K09", "ptrace_attach ptrace_seize process_vm_readv process_vm_writev pidfd_getfd", WORKS, _CLOSED),
    *_each("K09", "open_mem open_environ open_maps open_exe open_root open_cwd list_fd open_fd", WORKS, _CLOSED),
    Attempt("K09", "open_ns", WORKS, _CLOSED),
    *_each("K10", "process_madvise process_mrelease move_pages migrate_pages kcmp", EXISTS, _REFUSED),
    *_each("K11", "link_down address_add route_add link_new", (*EXISTS, "EOPNOTSUPP"), ("EPERM", "EAFNOSUPPORT")),
    *_each("K11", "netfilter_list audit uevent sock_diag", WORKS, ("EAFNOSUPPORT", "EPROTONOSUPPORT")),
    *_each(
        "K12", "mount mount_bind mount_propagation umount2 fsopen fspick open_tree open_tree_attr", EXISTS, _REFUSED
    ),
    *_each("K12", "mount_setattr fsmount fsconfig move_mount chroot pivot_root", EXISTS, _REFUSED),
    *_each("K12", "remount_usr_writable double_chroot", EXISTS, _REFUSED),
    *_each("K13", "socket_packet socket_packet_dgram socket_raw_ip socket_raw_icmp socket_raw_ip6", WORKS, _NO_SOCKET),
    *_each("K13", "socket_vsock socket_alg socket_xdp socket_bluetooth socket_sctp socket_dccp", EXISTS, _NO_SOCKET),
    *_each("K13", "socket_udplite socket_mptcp socket_can socket_tipc socket_rds socket_kcm", EXISTS, _NO_SOCKET),
    *_each("K13", "socket_smc socket_qipcrtr socket_ax25 socket_x25 socket_llc socket_pppox", EXISTS, _NO_SOCKET),
    *_each("K13", "socket_phonet socket_nfc socket_ieee802154 socket_caif socket_rxrpc socket_key", EXISTS, _NO_SOCKET),
    *_each("K13", "socket_unspecified socket_packet_in_inet socket_high", EXISTS, _NO_SOCKET),
    # EIO outside: dev.tty.legacy_tiocsti is off and the caller has no CAP_SYS_ADMIN in the first namespace.
    *_each("K14", "tiocsti tiocsti_high tiocsetd tioccons", EXISTS, _REFUSED),
    *_each("K14", "open_tty steal_tty", (*EXISTS, "EIO"), ("ENXIO", "ENOTTY")),
    *_each("K15", "tioclinux tioclinux_high", EXISTS, _REFUSED),
    *_each("K16", "read_implies_exec addr_no_randomize mmap_page_zero personality_high", WORKS, _REFUSED),
    *_each("K17", "settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname", EXISTS, _REFUSED),
    *_each("K17", "reboot swapon swapoff quotactl quotactl_fd acct open_by_handle_at", EXISTS, _REFUSED),
    *_each("K17", "fanotify_init prctl_set_mm prctl_securebits prctl_set_ptracer", EXISTS, _REFUSED),
    Attempt("K18", "regain_capabilities", WORKS, _REFUSED),
    Attempt("K18", "become_root", WORKS, ("EPERM", "EINVAL")),
    Attempt("K18", "become_somebody", EXISTS, ("EPERM", "EINVAL")),
    Attempt("K18", "prctl_no_new_privs_off", ("EINVAL",), ("EINVAL",)),
    Attempt("K18", "host_set_id_program", (*WORKS, "nosuid", "ENOENT"), ("nosuid", "ENOENT")),
    Attempt("F01", "write_own_exe", (*EXISTS, "ETXTBSY"), ("EACCES", "EPERM", "ETXTBSY", "EROFS")),
    Attempt("F01", "write_init_exe", (*EXISTS, "ETXTBSY"), ("EACCES", "EPERM", "ETXTBSY", "EROFS")),
    Attempt("F02", "directories_of_anybody", WORKS, ("none leads out",)),
    *_each("F07", "make_device make_block_device", EXISTS, _REFUSED),
    *(
        Attempt("F09", f"write_{name}", EXISTS, _NOT_THERE)
        for name in (
            *("sysrq", "core_pattern", "modprobe", "host_name", "panic_on_oom", "drop_caches", "ip_forward"),
            *("somaxconn", "irq_affinity", "mtrr", "binfmt_misc", "user_namespaces", "uevent_helper"),
            "proc_by_another_way",
        )
    ),
    *(
        Attempt("F09", f"read_{name}", EXISTS, _NOT_THERE)
        for name in ("kcore", "keys", "timer_list", "sched_debug", "kmsg", "firmware", "security", "debug")
    ),
    *_each("F09", "read_shadow read_machine_id read_host_log", EXISTS, _NOT_THERE),
    Attempt("F09", "kernel_addresses", EXISTS, _NOT_THERE),
    Attempt("F10", "processes_of_others", WORKS, ("nobody",)),
    Attempt("F11", "mount_cgroup", EXISTS, _REFUSED),
    Attempt("F11", "mount_cgroup2", EXISTS, _REFUSED),
    Attempt("F11", "cgroup_files", EXISTS, _NOT_THERE),
    Attempt("F15", "other_devices", WORKS, ("none",)),
)
#: What a system-call policy lets through on purpose, with the reason: policy → attempt → reason.
LET_THROUGH = {
    "permissive": {
        "addr_no_randomize": "debuggers want fixed addresses",
        "prctl_set_ptracer": "a crash handler may choose its debugger, among the sandbox's own processes",
    }
}


def of(threat: str) -> tuple[Attempt, ...]:
    """The attempts of one threat."""
    return tuple(item for item in ATTEMPTS if item.threat == threat)


def by_name(name: str) -> Attempt:
    """The attempt of that name. Raises KeyError."""
    for item in ATTEMPTS:
        if item.name == name:
            return item
    raise KeyError(name)


def for_caller(policy: str, uid: int, machine: str) -> tuple[Attempt, ...]:
    """Those that mean something under a policy, for an id inside, on a processor."""
    left = set(LET_THROUGH.get(policy, ()))
    left |= {"become_root"} if uid == 0 else set()
    left |= {"int_0x80", "x32_number"} if machine != "x86_64" else set()
    return tuple(item for item in ATTEMPTS if item.name not in left)


def judge(item: Attempt, control: str, inside: str) -> str:
    """``stopped``; ``absent``: this kernel has nothing to attack; ``through``; ``no control``: it proves nothing."""
    if inside not in (*item.stopped, *(ABSENT if control in ABSENT else ())):
        return "through"
    if control in ABSENT:
        return "absent"
    return "stopped" if control in item.shows else "no control"
