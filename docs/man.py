"""Writes docs/nsbox.1, the manual page, from the table that the command line is parsed by: ``python docs/man.py``.

In man(7). What an option, a word or an exit status means stands in ``nsbox.cli_options`` and ``nsbox.cli_words``; here
are only the sections that no table has.
"""

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

import nsbox
from nsbox.cli_options import HELP, RUN, Option
from nsbox.cli_words import EXAMPLES, EXIT_STATUS, WORDS, Word

TARGET = Path(__file__).with_name("nsbox.1")
DESCRIPTION = """\
nsbox runs a command that is not trusted in a sandbox of its own: namespaces, system-call filter, Landlock and limits
around a root file system in which nothing of the caller's is visible but what is named. A sandbox starts in
milliseconds, as root or as an ordinary user, without a daemon, and is gone with everything in it when the command ends.

The kernel is shared. A flaw in it is an escape; against somebody who would spend one, use virtual machines.

Nothing is ever run without a sandbox instead. Where a layer cannot be had, nsbox says so and ends with status 125.
"""
COMMANDS = """\
With --help each of them tells its options instead. nsbox --version prints the version.
"""
OPTIONS = """\
nsbox run, nsbox shell and nsbox python take these; they stand before the command. A value is the next word, or follows
behind an equals sign. Sizes are bytes, or have a suffix K, M, G or T (powers of 1024); times are seconds, or have ms,
s, m or h. In a profile file, what a sandbox is made of has the same names, with _ for -.
"""
ENVIRONMENT = (
    ("NSBOX_LOG", "The boundary log where no --log is given, and the one that nsbox log and nsbox stats read."),
    ("NSBOX_DEBUG", "If set, an error that is a bug in nsbox shows where it came from."),
    ("NSBOX_BENCH_PYTHON", "More interpreters for nsbox bench program, with colons between."),
    ("NO_COLOR", "If set, nothing is printed in colours."),
    ("XDG_RUNTIME_DIR", "Where an ordinary user's state directory is."),
    ("XDG_CACHE_HOME", "Where an ordinary user's compiled filters are kept; ~/.cache where it is not set."),
)
FILES = (
    ("/run/nsbox, $XDG_RUNTIME_DIR/nsbox", "The state directory, of root and of an ordinary user: what sandboxes are "
     "built on, and their writable layers while they run. nsbox gc removes what a killed process has left there."),
    ("/var/tmp/nsbox-UID", "Writable layers that have to be on disk."),
)  # fmt: skip
_TYPED = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "^": "\\(ha", "~": "\\(ti"}
SEE_ALSO = "namespaces(7), user_namespaces(7), seccomp(2), landlock(7), cgroups(7), overlayfs"


def page() -> str:
    """The whole page."""
    parts = [
        '.\\" Made by docs/man.py from the tables in nsbox/cli_options.py and nsbox/cli_words.py. Do not edit.',
        f'.TH NSBOX 1 "" "nsbox {nsbox.__version__}" "User Commands"',
        ".SH NAME",
        "nsbox \\- run a command in a throw-away sandbox",
        ".SH SYNOPSIS",
        *_synopsis(),
        ".SH DESCRIPTION",
        *_paragraphs(DESCRIPTION),
        ".SH COMMANDS",
        *_paragraphs(COMMANDS),
        *(line for word in WORDS for line in _word(word)),
        ".SH OPTIONS",
        *_paragraphs(OPTIONS),
        *_run_options(),
        ".SH EXIT STATUS",
        *(line for status, words in EXIT_STATUS for line in _item(_bold(status or "other"), f"{words}.")),
        ".SH ENVIRONMENT",
        *(line for name, words in ENVIRONMENT for line in _item(_bold(name), words)),
        ".SH FILES",
        *(line for name, words in FILES for line in _item(_italic(name), words)),
        ".SH EXAMPLES",
        *_examples(),
        ".SH SEE ALSO",
        *_wrapped(SEE_ALSO),
    ]
    return "\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Text as roff takes it: characters that are typed on a keyboard come out as those and no others."""
    return re.sub(r"[\\'^~-]", lambda found: _TYPED[found[0]], text)


def _wrapped(text: str) -> list[str]:
    lines = textwrap.wrap(" ".join(text.split()), 72, break_long_words=False, break_on_hyphens=False)
    # A sentence begins on a line of its own, so that roff knows where it ends.
    lines = [part for line in lines for part in re.split(r"(?<=\w[.:]) (?=[A-Z])", line)]
    return [("\\&" if line.startswith((".", "'")) else "") + _escaped(line) for line in lines]


def _paragraphs(text: str) -> list[str]:
    return [line for paragraph in text.strip().split("\n\n") for line in (".PP", *_wrapped(paragraph))][1:]


def _bold(text: str) -> str:
    return f"\\fB{_escaped(text)}\\fR"


def _italic(text: str) -> str:
    return f"\\fI{_escaped(text)}\\fR"


def _item(tag: str, text: str) -> list[str]:
    return [".TP", tag, *_wrapped(text)]


def _synopsis() -> Iterable[str]:
    for word in WORDS:
        yield f".SY nsbox\\~{word.name}"
        if word.arguments:
            yield _escaped(word.arguments)
        yield ".YS"


def _word(word: Word) -> Iterable[str]:
    yield f'.SS "nsbox {word.name}"'
    yield from _wrapped(word.text)
    for name, what in word.names:
        yield from _item(_bold(name), what)
    for option in word.options:
        # What all have in common stands in sections of its own.
        if option not in RUN and option not in HELP:
            yield from _option(option)


def _option(option: Option) -> list[str]:
    flags = [_bold(option.short)] if option.short else []
    long = _bold(option.flag) + (f" {_italic(option.metavar)}" if option.metavar else "")
    return _item(", ".join([*flags, long]), option.help)


def _run_options() -> Iterable[str]:
    group = ""
    for option in RUN:
        if option.group != group:
            group = option.group
            yield f'.SS "{_escaped(group)}"'
        yield from _option(option)


def _examples() -> Iterable[str]:
    yield ".EX"
    yield from map(_escaped, EXAMPLES)
    yield ".EE"


if __name__ == "__main__":
    TARGET.write_text(page())
