"""The options of the command line: one table that is parsed by, that --help prints, and that tests compare with Spec.

Not argparse: importing and filling it costs more than the whole sandbox does (6 ms against 2), and it neither stops at
the command's own options nor leaves abbreviations alone.
"""

from __future__ import annotations

from nsbox.errors import SpecError
from nsbox.light import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

# What an option does with its value: nothing to take; kept as text, number or NAME=VALUE; collected into a list.
ON, OFF, TEXT, NUMBER, LIST, PAIR = "on", "off", "text", "number", "list", "pair"


class Option(NamedTuple):
    """One option. ``key`` is a field of Spec, or what the commands call it when ``own``."""

    flag: str
    key: str
    kind: str
    metavar: str
    help: str
    group: str
    own: bool = False
    short: str = ""


def _group(name: str, *options: tuple[str, str, str, str], own: bool = False) -> list[Option]:
    """Options by (flag, kind, metavar, help); the key is the flag's name."""
    return [Option(flag, flag[2:].replace("-", "_"), kind, meta, text, name, own) for flag, kind, meta, text in options]


RUN = (
    Option(
        "--profile",
        "profile",
        TEXT,
        "NAME|FILE",
        "a shipped profile or a TOML file; the options here win over it",
        "What is visible inside",
        True,
    ),
    Option(
        "--secret",
        "secrets",
        LIST,
        "NAME=env:VAR|file:PATH|stdin",
        "a file /run/secrets/NAME that only the command's user can read; repeatable",
        "What is visible inside",
    ),
    *_group(
        "What is visible inside",
        (
            "--root",
            TEXT,
            "host|DIR",
            "host: the host's /usr and a made-up /etc (default); DIR: a root file system tree",
        ),
        ("--ro", LIST, "SRC[:DST]", r"show a file or directory, read-only; \: is a colon in a path; repeatable"),
        ("--rw", LIST, "SRC[:DST]", "show a file or directory whose original may be changed; repeatable"),
        (
            "--workspace",
            TEXT,
            "DIR[:DST]",
            "copy-on-write view of DIR at DST (/work), and start there; DIR never changes",
        ),
        ("--export", TEXT, "DIR", "after the run, what changed in the workspace is copied to DIR (new or empty)"),
        ("--apply", ON, "", "after a run that succeeded, what changed is written back into the workspace's DIR"),
        (
            "--allow-trusted",
            LIST,
            "PATH",
            "takes out a changed file that the host would act upon by itself; repeatable",
        ),
        ("--allow-sensitive", LIST, "PATH", "lets a mount through that the guard refuses; repeatable"),
        ("--log", TEXT, "FILE", "append the boundary log there, a JSON line for each event"),
        ("--tmpfs", LIST, "DST[:SIZE]", "an empty file system in memory; repeatable"),
        ("--scratch", TEXT, "tmpfs|DIR", "where what is written inside is kept meanwhile (tmpfs, which is memory)"),
        ("--secret-env", ON, "", "secrets are variables as well, which all that runs inside inherits"),
        (
            "--secret-fd",
            ON,
            "",
            "secrets are no files but descriptors that are read once, from 3 up; NAME_FD tells which",
        ),
        ("--env", PAIR, "NAME=VALUE", "set a variable; nothing of the caller's environment is passed on; repeatable"),
        ("--cwd", TEXT, "DIR", "where the command starts (the workspace, else the home directory)"),
        ("--hostname", TEXT, "NAME", "the host name inside (nsbox)"),
        ("--uid", NUMBER, "N", "the user id inside (1000); 0 is a root without any capability"),
    ),
    *_group(
        "What is possible",
        ("--net", TEXT, "none|filtered|host", "none: loopback only (default); host also wants --allow-host-net"),
        ("--allow", LIST, "HOST[:PORT][/udp]", "a name, *.name, address or CIDR that may be reached; repeatable"),
        ("--net-path", TEXT, "auto|veth|gateway", "how filtered egress is carried (auto)"),
        ("--allow-host-net", ON, "", "yes, the host's whole network"),
        ("--seccomp", TEXT, "NAME", "system calls allowed: strict, default or permissive"),
    ),
    Option("--no-landlock", "landlock", OFF, "", "leave out the second wall behind the mounts", "What is possible"),
    *_group(
        "What is possible",
        ("--require", LIST, "LAYER[=kernel]", "refuse to run unless this layer is enforced; repeatable"),
        ("--degrade", LIST, "LAYER", "run without this layer where it cannot be had; repeatable"),
    ),
    *_group(
        "Limits: each can be 'unlimited'",
        ("--memory", TEXT, "SIZE", "memory of everything inside together (512M)"),
        ("--cpus", TEXT, "N", "processors (1.0)"),
        ("--pids", TEXT, "N", "processes and threads (128)"),
        ("--disk", TEXT, "SIZE", "everything written inside (256M)"),
        ("--files", TEXT, "N", "open files of one process (1024)"),
        ("--file-size", TEXT, "SIZE", "one file (unlimited: the disk limit holds)"),
        ("--timeout", TEXT, "TIME", "wall clock, as 500ms, 30s, 2m, 1h (30s)"),
        ("--cpu-time", TEXT, "TIME", "processor time, summed (30s)"),
        ("--io", TEXT, "SIZE", "bytes a second from and to each disk (unlimited)"),
        ("--cpuset", TEXT, "LIST", "run on these processors only, as 0-2,5"),
        ("--nice", NUMBER, "N", "lower priority, 0 to 19 (0)"),
        ("--ionice", TEXT, "CLASS", "idle, or best-effort:0 to best-effort:7"),
        ("--grace", TEXT, "TIME", "at the end of its time the command gets SIGTERM, and this long to end (0s)"),
        ("--output", TEXT, "SIZE", "what is passed on of each of stdout and stderr (10M)"),
        ("--net-connections", TEXT, "N", "open connections of filtered egress (512)"),
        ("--net-bytes", TEXT, "SIZE", "everything sent by filtered egress (1G)"),
        ("--net-rate", TEXT, "N", "new connections of filtered egress a second; more have to wait (1000)"),
    ),
    *_group(
        "Input, output, messages",
        ("--stdin", ON, "", "pass this command's standard input on; without it the command reads nothing"),
        (
            "--publish",
            LIST,
            "[HOST:]PORT",
            "have a port of 127.0.0.1, or a unix socket, lead to PORT inside; repeatable",
        ),
        ("--tty", ON, "", "give the command a terminal of the sandbox's own, joined to this one"),
        ("--report", TEXT, "FILE", "write the report there as JSON"),
        ("--json", ON, "", "write the report to standard output instead of what the command writes"),
        ("--review", ON, "", "show what changed, and ask on the terminal before it is applied (or only exported)"),
        own=True,
    ),
    Option("--quiet", "quiet", ON, "", "say nothing but errors", "Input, output, messages", True, "-q"),
    Option(
        "--verbose",
        "verbose",
        ON,
        "",
        "tell what the sandbox is made of and how long each step took",
        "Input, output, messages",
        True,
        "-v",
    ),
    Option("--help", "help", ON, "", "this text", "Input, output, messages", True, "-h"),
)

PYTHON = (
    Option("--python", "python", TEXT, "FILE", "another interpreter than the one that nsbox runs in", "Python", True),
    *RUN,
)

HELP = (RUN[-1]._replace(group="Options"),)
LOG = (
    Option("--sandbox", "sandbox", TEXT, "ID", "one run as a story; the beginning of its id will do", "Options", True),
    Option("--follow", "follow", ON, "", "go on with what is appended, until interrupted", "Options", True, "-f"),
    Option("--json", "json", ON, "", "the events as JSON, one a line", "Options", True),
    *HELP,
)
STATS = (
    Option("--json", "json", ON, "", "the numbers as JSON", "Options", True),
    Option("--html", "html", TEXT, "FILE", "a page with graphs that needs nothing else", "Options", True),
    Option("--prometheus", "prometheus", ON, "", "the exposition format of Prometheus", "Options", True),
    *HELP,
)
BENCH = (
    Option(
        "--quick", "quick", ON, "", "a few seconds in place of minutes: a look, no figures to keep", "Options", True
    ),
    Option("--json", "json", TEXT, "FILE", "write all figures there", "Options", True),
    Option("--plot", "plot", TEXT, "FILE", "draw the plots there, as one SVG file", "Options", True),
    Option("--svg", "svg", TEXT, "DIR", "draw the plots there, each as NAME.svg", "Options", True),
    *HELP,
)
SELFTEST = (
    Option(
        "--profile", "profile", TEXT, "NAME|FILE", "the profile whose sandboxes are attacked (default)", "Options", True
    ),
    Option("--verbose", "verbose", ON, "", "a line for each attempt, not for each attack", "Options", True, "-v"),
    Option("--json", "json", ON, "", "every attempt as JSON", "Options", True),
    *HELP,
)
DOCTOR = (Option("--json", "json", ON, "", "every fact as JSON", "Options", True), *HELP)

# Names that are reserved for what is to come, so that using them is told apart from a slip of the pen.
_LATER = ""
NOT_YET = frozenset(f"--{word}" for word in _LATER.split())


def by_flag(table: Iterable[Option]) -> dict[str, Option]:
    """Every way to write an option → the option."""
    return {flag: option for option in table for flag in (option.flag, option.short) if flag}


def parse(
    arguments: Sequence[str], table: Iterable[Option], ends: str = "", anywhere: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Option values by key, and what follows them: from the first word that is no option, or after ``--``.

    ``ends`` is an option that belongs to what follows. With ``anywhere`` options may also stand behind words. Raises
    SpecError for an option that is unknown or lacks a value.
    """
    known, rest = by_flag(table), list(arguments)
    values: dict[str, Any] = {}
    words: list[str] = []
    while rest:
        word = rest[0]
        if word == "--":
            return values, words + rest[1:]
        if word == "-" or not word.startswith("-") or (ends and word.startswith(ends) and not word.startswith("--")):
            if not anywhere:
                break
            words.append(rest.pop(0))
            continue
        del rest[0]
        for flag, value in _split(word):
            option = known.get(flag) or _unknown(flag, known)
            _store(values, option, value, rest)
    return values, words + rest


def _split(word: str) -> list[tuple[str, str | None]]:
    """``--flag``, ``--flag=VALUE``, or several one-letter flags in one word."""
    if not word.startswith("--"):
        return [(f"-{letter}", None) for letter in word[1:]]
    flag, equals, value = word.partition("=")
    return [(flag, value if equals else None)]


def _store(values: dict[str, Any], option: Option, value: str | None, rest: list[str]) -> None:
    if option.kind in (ON, OFF):
        if value is not None:
            raise SpecError(f"{option.flag} takes no value")
        values[option.key] = option.kind == ON
        return
    if value is None:
        if not rest or rest[0] == "--":
            raise SpecError(f"{option.flag} wants a value: {option.flag} {option.metavar}")
        value = rest.pop(0)
    if option.kind == LIST:
        values.setdefault(option.key, []).append(value)
    elif option.kind == PAIR:
        name, equals, text = value.partition("=")
        if not equals:
            own = f'{option.flag} {value}="${value}"'
            raise SpecError(f"{option.flag} wants {option.metavar}, not {value!r}; to pass your own on: {own}")
        values.setdefault(option.key, {})[name] = text
    elif option.kind == NUMBER and value.isascii() and value.isdigit():
        values[option.key] = int(value)
    else:
        values[option.key] = value


def _unknown(flag: str, known: Iterable[str]) -> Option:
    if flag in NOT_YET:
        raise SpecError(f"{flag} is not in this version; nsbox run --help lists what is")
    raise SpecError(
        f"unknown option {flag}{suggestion(flag, known)}; options of the command itself come after it or after --"
    )


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean …?`` where something known is close, else nothing."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def help_text(table: Iterable[Option], width: int) -> str:
    """The table in words, group by group, at most ``width`` columns wide."""
    import textwrap

    groups: dict[str, list[Option]] = {}
    for option in table:
        groups.setdefault(option.group, []).append(option)
    lines = []
    for group, options in groups.items():
        lines += ["", f"{group}:"]
        for option in options:
            left = "  " + (f"{option.short}, " if option.short else "") + f"{option.flag} {option.metavar}".rstrip()
            text = textwrap.wrap(option.help, max(30, width - 28))
            if len(left) > 26:
                lines.append(left)
                left = ""
            lines += [f"{left:<28}{text[0]}", *(" " * 28 + line for line in text[1:])]
    return "\n".join(lines) + "\n"
