"""The words of the command line, ``nsbox WORD``: one table that the help, the man page and the completion are made of.

Imported only where it is printed from: a run does not pay for it.
"""

from typing import NamedTuple

from nsbox.cli_options import BENCH, DOCTOR, HELP, LOG, PYTHON, RUN, SELFTEST, STATS, Option

# What the words behind the options are: a command and what belongs to it; a file and arguments; files; a profile; some
# of ``Word.names``.
COMMAND, SCRIPT, FILES, PROFILE, NAMED, NOTHING = "command", "script", "files", "profile", "named", "nothing"


class Word(NamedTuple):
    """One word. ``arguments`` is what a usage line has behind it; ``text`` says more than the one-line ``summary``;
    ``names`` are (name, what it is); with ``anywhere`` options may also stand behind other words."""

    name: str
    arguments: str
    summary: str
    text: str
    options: tuple[Option, ...] = HELP
    takes: str = NOTHING
    names: tuple[tuple[str, str], ...] = ()
    anywhere: bool = False


WORDS = (
    Word(
        "run",
        "[OPTIONS] [--] COMMAND [ARG...]",
        "one fresh sandbox, one command, gone afterwards",
        "Runs COMMAND in a fresh sandbox that is thrown away.",
        RUN,
        COMMAND,
    ),
    Word(
        "shell",
        "[OPTIONS]",
        "an interactive shell in a fresh sandbox",
        "An interactive shell in a fresh sandbox, on a terminal of the sandbox's own. There is no time limit unless "
        "one is given.",
        RUN,
    ),
    Word(
        "python",
        "[OPTIONS] FILE|-|-c CODE [ARG...]",
        "this interpreter and its packages in a fresh sandbox",
        "Runs Python code in a fresh sandbox that is thrown away, with this interpreter and its packages, read-only. "
        "Only FILE itself is shown inside, read-only too; - reads the code from standard input.",
        PYTHON,
        SCRIPT,
    ),
    Word(
        "profiles",
        "[NAME]",
        "the shipped profiles, or one of them in full",
        "Lists the shipped profiles, or prints one of them in full.",
        takes=PROFILE,
    ),
    Word(
        "doctor",
        "[--json]",
        "what this host can enforce, and what mends the rest",
        "Probes what this host can enforce. The exit status is 125 where something is missing that every sandbox "
        "needs.",
        DOCTOR,
    ),
    Word(
        "log",
        "[FILE] [--follow] [--sandbox ID]",
        "the boundary log, readable",
        "Prints a boundary log, one line for each event. FILE is $NSBOX_LOG where none is named.",
        LOG,
        FILES,
        anywhere=True,
    ),
    Word(
        "stats",
        "[FILE...] [--json] [--html FILE]",
        "the numbers over boundary logs",
        "Counts over boundary logs, in any order: how much runs in sandboxes, how long they live, which limits are "
        "hit, what is let through, which secrets are present. FILE is $NSBOX_LOG where none is named.",
        STATS,
        FILES,
        anywhere=True,
    ),
    Word(
        "bench",
        "[WHAT...] [--quick]",
        "what isolation costs on this host",
        "Measures what isolation costs on this host. It takes minutes, or seconds with --quick, on a machine that does "
        "nothing else. WHAT is one or more of these, and the first three where none is named:",
        BENCH,
        NAMED,
        (
            ("layers", "one layer added at a time, from a bare process to filtered egress"),
            ("start", "a fresh sandbox against posix_spawn and the programs of this host that isolate"),
            ("runtime", "the same work inside and outside"),
            ("throughput", "starts a second with several workers"),
            ("memory", "what idle sandboxes hold"),
            ("program", "this command as a process of its own"),
            ("pools", "sandboxes and interpreters made ahead"),
        ),
        anywhere=True,
    ),
    Word(
        "selftest",
        "[--json] [--profile NAME|FILE]",
        "attack a sandbox on this host, and say what was stopped",
        "Attempts attacks from inside sandboxes on this host, each after a control that shows that it works outside. "
        "It changes nothing on the host. Exit status: 0 when all were stopped, 1 when something got through, 125 when "
        "it could not be run.",
        SELFTEST,
    ),
    Word(
        "gc",
        "",
        "remove what killed processes have left, and say what it was",
        "Removes what killed processes have left, one line for each.",
    ),
    Word(
        "completion",
        "bash|zsh|fish",
        "a script for that shell that completes all of this",
        "Prints a script that completes the words, options and values of nsbox in a shell:",
        HELP,
        NAMED,
        (
            ("bash", "put 'eval \"$(nsbox completion bash)\"' into ~/.bashrc"),
            ("zsh", "write it to a file _nsbox in a directory of $fpath"),
            ("fish", "write it to ~/.config/fish/completions/nsbox.fish"),
        ),
    ),
)

EXAMPLES = (
    "nsbox run -- sh -c 'id; ls -la ~; ps'",
    "nsbox run --workspace . --timeout 2m -- make test",
    "nsbox run --ro data.csv:/data.csv --memory 1G -- python3 -c 'print(open(\"/data.csv\").readline())'",
    "nsbox python --ro ./dataset:/data script.py",
)
#: (status, what it says); "" is every other one
EXIT_STATUS = (
    ("", "the command's own"),
    ("128+n", "where signal n ended it"),
    ("124", "after a time limit"),
    ("137", "after the memory limit"),
    ("125", "where nsbox itself could not, with the reason on standard error"),
    ("126", "where the command could not be executed"),
    ("127", "where it was not found"),
)


def by_name(name: str) -> Word:
    """The word of that name."""
    return next(word for word in WORDS if word.name == name)


def usage() -> str:
    """A line for each word."""
    lines = [(f"nsbox {word.name} {word.arguments}", word.summary) for word in WORDS]
    out = [f"{'usage:' if not number else '':<7}{left:<49}{right}" for number, (left, right) in enumerate(lines)]
    return "\n".join([*out, f"{'':<7}nsbox --version"]) + "\n"


def examples(width: int) -> str:
    """Examples, and what the exit status says."""
    import textwrap

    status = [f"{number} {words}".lstrip() for number, words in EXIT_STATUS]
    lines = ["", "examples:", *(f"  {example}" for example in EXAMPLES), ""]
    return "\n".join([*lines, *textwrap.wrap(f"Exit status: {'; '.join(status)}.", width)]) + "\n"


def help_of(name: str, width: int) -> str:
    """What ``nsbox WORD --help`` prints, at most ``width`` columns wide but for the usage and examples."""
    import textwrap

    from nsbox.cli_options import help_text

    word = by_name(name)
    text = [f"usage: nsbox {word.name} {word.arguments}".rstrip(), "", *textwrap.wrap(word.text, width)]
    text += [f"  {name:<12}{what}" for name, what in word.names]
    return "\n".join(text) + "\n" + help_text(word.options, width) + (examples(width) if word.options == RUN else "")
