"""What nsbox is attacked with: one entry for each attack, told in words. Attempts carry the identifiers.

K: the kernel's interface. F: files and descriptors. N: the network. R: resources. S: secrets, and what holds them.
"""

from typing import NamedTuple

_WORLD = "it takes name servers and hosts of its own"
_ROOT = "it takes files or mounts that only root can make"
_POOLS = "it takes a template of interpreters"
_LACKING = "it takes a host without controllers"
_LONG = "it kills embedding processes by the hundred"


class Threat(NamedTuple):
    """An attack, and what shows that it would work where nothing stops it."""

    id: str
    attack: str
    control: str
    #: why ``nsbox selftest`` leaves it to the tests; "" where it does not
    left: str = ""


_IN_NAMESPACES = "the same call by root over namespaces of its own, outside"
_CALL_EXISTS = "outside the kernel looks at the arguments, so the call exists"

THREATS = (
    Threat("K01", "set up, enter or register an io_uring, whose requests no filter sees", _CALL_EXISTS),
    Threat("K02", "make a directory through the 32-bit entry of the kernel (int 0x80)", "it appears outside"),
    Threat("K03", "make a directory through an x32 number; hide a number in the upper half", "the plain number works"),
    Threat("K04", "ask for a namespace by clone3, whose flags lie in memory", _IN_NAMESPACES),
    Threat("K05", "make a namespace of each kind by unshare and clone", _IN_NAMESPACES),
    Threat("K06", "enter a namespace by descriptor or pidfd", _IN_NAMESPACES),
    Threat("K07", "load code into the kernel or look into it: bpf, perf, userfaultfd, modules, kexec", _CALL_EXISTS),
    Threat("K08", "reach keys that the user's other processes hold", _CALL_EXISTS),
    Threat("K09", "trace, read, write or open the sandbox's init", "a child of one's own can be"),
    Threat("K10", "advise, move, compare or reap another process's memory", _CALL_EXISTS),
    Threat("K11", "change links, addresses and routes; open netfilter, audit and the like", _IN_NAMESPACES),
    Threat("K12", "mount, unmount, remount, move, pivot_root, climb out of a chroot", _IN_NAMESPACES),
    Threat("K13", "open a socket of an obscure family, raw or packet", "packet and raw sockets open outside"),
    Threat("K14", "type into the caller's terminal, or take it", "a terminal of one's own takes the request"),
    Threat("K15", "drive the console's selection (TIOCLINUX)", "outside the terminal is asked"),
    Threat("K16", "switch hardening off: executable data, fixed addresses, page zero", "it can be, outside"),
    Threat("K17", "change the clock, the host's name, swap, quotas, accounting; reboot", _CALL_EXISTS),
    Threat("K18", "gain rights by a set-id program, a file capability, capset or setuid", "each gains them outside"),
    Threat("K19", "try every system call number", "getpid answers; outside, the dangerous ones are there"),
    Threat("F01", "overwrite the program that starts sandboxes, by /proc/self/exe", "an own program can be"),
    Threat("F02", "climb out by a directory that somebody has open", "a directory outside the root leads out"),
    Threat("F03", "use descriptors that the caller had open", "a plain child inherits them"),
    Threat("F04", "swap a place for a link while the root is built", "the link leads there", _ROOT),
    Threat("F05", "have the host follow `..` or a link in a path that it reads or writes", "the link leads there"),
    Threat("F06", "plant links in the outputs, for the host to follow", "a plain copy follows them"),
    Threat("F07", "make or open a device node", "root makes and opens it outside; else the call exists"),
    Threat("F08", "write to a mount beneath a read-only one", "it is writable outside", _ROOT),
    Threat("F09", "act on the host or learn of it through /proc and /sys", "the entries are there outside"),
    Threat("F10", "see processes outside", "outside there are"),
    Threat("F11", "reach a cgroup file system", "there is one outside"),
    Threat("F12", "leave a file that the host acts upon by itself: hooks, start files, CI", "let through, it arrives"),
    Threat("F13", "have the host evaluate what comes out", "a host that unpickles runs it"),
    Threat("F14", "use names that confuse: control characters, no UTF-8, 255 bytes", "such files can be made"),
    Threat("F15", "find a device in /dev that is not harmless", "outside there are"),
    Threat("N01", "reach anything or resolve a name where no network was given", "outside it is reached"),
    Threat("N02", "take an empty list for everything", "listed, it is reached"),
    Threat("N03", "resolve an allowed name to a private or loopback address", "a public one is reached", _WORLD),
    Threat("N04", "reach the metadata service of a cloud", "another address is reached", _WORLD),
    Threat("N05", "change what a name means between check and connect", "both are reached where allowed", _WORLD),
    Threat("N06", "smuggle data out in names", "an allowed name is asked for", _WORLD),
    Threat("N07", "use a resolver of one's own, or DNS in another protocol", "it answers where allowed", _WORLD),
    Threat("N08", "reach services of the host or of another sandbox", "outside, or listed, they are reached"),
    Threat("N09", "reach a unix socket of the host, abstract or by path", "outside it is reached"),
    Threat("N10", "send by another protocol or address family", "it leaves where allowed", _WORLD),
    Threat("N11", "flush the rules, delete routes, take links down", "the owner of a namespace can", _WORLD),
    Threat("N12", "use the moment of a policy's change, or its failure", "a change that works is seen", _WORLD),
    Threat("N13", "name one host in the stream and mean another", "the allowed name is served", _WORLD),
    Threat("R01", "fork without end", "the same number of processes outside"),
    Threat("R02", "take more memory than allowed, in every form", "the same amount outside"),
    Threat("R03", "fill the disk; use up its inodes", "the same where the limit is wider"),
    Threat("R04", "write output without end", "outside it all arrives"),
    Threat("R05", "live on: double fork, own session, deaf to signals", "outside it lives on"),
    Threat("R06", "loop", "outside it goes on"),
    Threat("R07", "sleep, or wait for input, for ever", "outside it goes on"),
    Threat("R08", "open descriptors and start threads without end", "outside more can be opened"),
    Threat("R09", "share memory or semaphores with the host or a neighbour", "outside it is found"),
    Threat(
        "R10", "be left behind by an embedding process that is killed at any stage", "until then it is there", _LONG
    ),
    Threat("R11", "run without a limit that the host cannot enforce, unnoticed", "with it, the run starts", _LACKING),
    Threat("S01", "find credentials of the caller in any process inside", "a plain child has them"),
    Threat("S02", "find what the one before left in a pool's member", "in one sandbox the next command finds it"),
    Threat("S03", "meet another member's random numbers, locks, sockets", "a plain fork shares them", _POOLS),
    Threat("S04", "run in the template that others are made of", "the template runs what it preloads", _POOLS),
    Threat("S05", "print a secret", "inside it is read"),
    Threat("S06", "find a secret after its time", "before that it is read"),
    Threat("S07", "cut, forge or outlive the boundary log", "whoever has the path can write it"),
    Threat("S08", "run where the isolation cannot be had", "where it can be had, it runs"),
    Threat("S09", "have credentials or control sockets mounted", "named as sensitive, it is mounted"),
)
BY_ID = {threat.id: threat for threat in THREATS}
