"""``nsbox completion SHELL``: a script that completes the command line, made of the table that it is parsed by.

The scripts know everything when they are made; no key press starts a Python. What stands behind a command's own name is
left to that command's completion.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from nsbox import cli_words, profiles
from nsbox.cli_options import OFF, ON, Option
from nsbox.cli_words import WORDS, Word
from nsbox.errors import SpecError

_PATHS = {"FILE": "file", "PATH": "file", "SRC": "file", "DIR": "dir"}


class Values(NamedTuple):
    """What may stand behind an option: these words, and a ``file`` or ``dir`` (or neither: "")."""

    words: tuple[str, ...] = ()
    path: str = ""


def script(words: Sequence[str]) -> str:
    """The script for the shell that the command line names. Raises SpecError."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise SpecError(f"completion: name one shell of {', '.join(SHELLS)}; write: nsbox completion bash")
    return SHELLS[words[0]]()


def values_of(option: Option) -> Values:
    """By the option's metavar, ``FILE``, ``none|filtered|host`` and the like; names that are known come from where they
    are defined."""
    named = _names().get(option.key)
    # ``=`` is in NAME=VALUE, of which no part can be completed.
    parts = [] if "=" in option.metavar else option.metavar.split("|")
    paths = [_PATHS[part] for item in parts if (part := re.split(r"[\[:]", item)[0]) in _PATHS]
    words = [item for item in parts if re.fullmatch(r"[a-z]+", item)]
    return Values(tuple(words if named is None else named), paths[0] if paths else "")


def _names() -> dict[str, list[str]]:
    from nsbox.plan.policy import load_policies
    from nsbox.spec import LAYERS

    return {
        "profile": profiles.names(),
        "seccomp": list(load_policies()),
        "require": list(LAYERS),
        "degrade": list(LAYERS),
        "ionice": ["idle", "best-effort"],
    }


def _positional(word: Word) -> list[str]:
    """The names that the word takes."""
    return profiles.names() if word.takes == cli_words.PROFILE else [name for name, _ in word.names]


def _valued(options: Iterable[Option]) -> list[Option]:
    return [option for option in options if option.kind not in (ON, OFF)]


def _flags(options: Iterable[Option]) -> list[str]:
    return [flag for option in options for flag in (option.flag, option.short) if flag]


# ---- bash ---------------------------------------------------------------------------------------------------------

_BASH = r"""# bash completion of nsbox; made by: nsbox completion bash
_nsbox() {
    local -a words=() starts=()
    local rest=${COMP_LINE:0:COMP_POINT} trimmed part i flag= at=0 flags= valued= takes= anywhere= values= path= cur
    # bash splits words at = and : as well; what no blank separates is one word to nsbox.
    for ((i = 0; i <= COMP_CWORD; i++)); do
        part=${COMP_WORDS[i]} trimmed=${rest#"${rest%%[![:space:]]*}"}
        if ((i)) && [[ $trimmed == "$rest" && -n $rest ]]; then
            words[-1]+=$part
        else
            words+=("$part") starts+=("$i")
        fi
        rest=${trimmed:${#part}}
    done
    local n=$((${#words[@]} - 1)) whole=${words[-1]}
    cur=${COMP_WORDS[COMP_CWORD]}
    [[ $cur == [=:] ]] && cur=
    COMPREPLY=()
    if ((n == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "@WORDS@ --help --version" -- "$cur")
        return
    fi
    case ${words[1]} in
@CASES@
        *) return ;;
    esac
    # Which option wants the word at the cursor; where the options end.
    for ((i = 2; i < n; i++)); do
        case ${words[i]} in
            --) at=$((i + 1)) ;;
            -c*) [[ $takes == script ]] && at=$i ;;
            --*=*) ;;
            -*)
                if [[ $valued == *" ${words[i]} "* ]]; then
                    ((++i < n)) || flag=${words[n - 1]}
                fi
                ;;
            *) [[ $anywhere ]] || at=$i ;;
        esac
        ((at)) && break
    done
    if ((!at)) && [[ -z $flag && $whole == --*=* ]]; then
        flag=${whole%%=*}
    fi
    if [[ $flag ]]; then
        case $flag in
@VALUES@
        esac
    elif ((!at)) && [[ $cur == -* ]]; then
        values=$flags
    elif [[ $takes == command ]]; then
        if ((!at || at == n)); then
            path=command
        elif declare -F _comp_command_offset >/dev/null; then
            _comp_command_offset "${starts[at]}"
            return
        elif declare -F _command_offset >/dev/null; then
            _command_offset "${starts[at]}"
            return
        else
            path=file
        fi
    elif [[ $takes == script || $takes == files ]]; then
        path=file
    elif [[ $anywhere ]] || ((n == 2)); then
        values=$takes
    fi
    case $path in
        file | dir | command) compopt -o filenames 2>/dev/null ;; # also quotes what is put into the line
    esac
    case $path in
        file) mapfile -t COMPREPLY < <(compgen -f -W "$values" -- "$cur") ;;
        dir) mapfile -t COMPREPLY < <(compgen -d -W "$values" -- "$cur") ;;
        command) mapfile -t COMPREPLY < <(compgen -c -- "$cur") ;;
        *) mapfile -t COMPREPLY < <(compgen -W "$values" -- "$cur") ;;
    esac
}
complete -F _nsbox nsbox
"""


def _bash() -> str:
    cases, wanted = [], dict[Values, list[str]]()
    for word in WORDS:
        valued = _valued(word.options)
        for option in valued:
            flags = wanted.setdefault(values_of(option), [])
            flags += [flag for flag in _flags([option]) if flag not in flags]
        takes = " ".join(_positional(word)) or word.takes.replace(cli_words.NOTHING, "")
        anywhere = "yes" if word.anywhere else ""
        cases.append(
            f"        {word.name})\n"
            f'            flags="{" ".join(_flags(word.options))}"\n'
            f'            valued=" {" ".join(_flags(valued))} "\n'
            f'            takes="{takes}" anywhere={anywhere}\n'
            "            ;;"
        )
    values = [
        f'            {" | ".join(flags)}) values="{" ".join(found.words)}" path={found.path} ;;'
        for found, flags in wanted.items()
        if found != Values()
    ]
    return (
        _BASH.replace("@WORDS@", " ".join(word.name for word in WORDS))
        .replace("@CASES@", "\n".join(cases))
        .replace("@VALUES@", "\n".join(values))
    )


# ---- zsh ----------------------------------------------------------------------------------------------------------

_ZSH = r"""#compdef nsbox
# zsh completion of nsbox; made by: nsbox completion zsh
_nsbox() {
    local curcontext=$curcontext state state_descr line ret=1
    typeset -A opt_args
    _arguments -C -A '-*' '(- *)'{-h,--help}'[the words]' '(- *)'{-V,--version}'[the version]' \
        '1:word:->word' '*::argument:->rest' && ret=0
    case $state in
        word)
            local -a found=(
@WORDS@
            )
            _describe -t commands 'word of nsbox' found && ret=0
            ;;
        rest)
            case $line[1] in
@CASES@
            esac
            ;;
    esac
    return ret
}
if [[ $funcstack[1] == _nsbox ]]; then
    _nsbox "$@"
else
    compdef _nsbox nsbox
fi
"""
_ZSH_TAKES = {
    cli_words.COMMAND: ["(-)1:command: _command_names -e", "*::argument: _normal"],
    cli_words.SCRIPT: ["(-)-c[code]:code: ", "(-)1:file:_files", "*:argument:_files"],
    cli_words.FILES: ["*:file:_files"],
}


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _zsh() -> str:
    names = [f"{' ' * 16}{_quoted(f'{word.name}:{word.summary}')}" for word in WORDS]
    cases = []
    for word in WORDS:
        specs = [spec for option in word.options for spec in _zsh_specs(option)]
        which = f"{'*' if word.anywhere else '1'}:name:({' '.join(_positional(word))})"
        specs += [which] if _positional(word) else _ZSH_TAKES.get(word.takes, [])
        start = "_arguments -s -S" + ("" if word.anywhere else " -A '-*'")
        lines = " \\\n".join([f"{' ' * 20}{start}", *(" " * 24 + _quoted(spec) for spec in specs)])
        cases.append(f"{' ' * 16}{word.name})\n{lines} && ret=0\n{' ' * 20};;")
    return _ZSH.replace("@WORDS@", "\n".join(names)).replace("@CASES@", "\n".join(cases))


def _zsh_specs(option: Option) -> list[str]:
    text = re.sub(r"([\[\]\\])", r"\\\1", option.help)
    if option.kind in (ON, OFF):
        return [f"{flag}[{text}]" for flag in _flags([option])]
    values, message = values_of(option), re.sub(r"([:\\])", r"\\\1", option.metavar)
    action = {"file": "_files", "dir": "_files -/", "": " "}[values.path]
    if values.words:
        words = " ".join(values.words)
        action = f'_alternative "values\\:value\\:({words})" "files\\:file\\:{action}"' if values.path else f"({words})"
    return [f"*{option.flag}=[{text}]:{message}:{action}"]


# ---- fish ---------------------------------------------------------------------------------------------------------

_FISH = r"""# fish completion of nsbox; made by: nsbox completion fish

# Prints where what follows the options begins, among the words before the cursor; nothing while it has not begun.
function __nsbox_start
    set -l tokens (commandline -opc)
    set -l valued @VALUED@
    set -l i 3
    while test $i -le (count $tokens)
        switch $tokens[$i]
            case --
                math $i + 1
                return
            case '-c*'
                if test $tokens[2] = python
                    echo $i
                    return
                end
            case '--*=*'
            case '-*'
                contains -- $tokens[$i] $valued; and set i (math $i + 1)
            case '*'
                if not contains -- $tokens[2] @ANYWHERE@
                    echo $i
                    return
                end
        end
        set i (math $i + 1)
    end
end

function __nsbox_in
    set -l tokens (commandline -opc)
    test (count $tokens) -ge 2; and test $tokens[2] = $argv[1]
end

function __nsbox_options
    __nsbox_in $argv[1]; and test -z (__nsbox_start)
end

# What the command itself would complete.
function __nsbox_command
    set -l tokens (commandline -opc)
    set -l start (__nsbox_start)
    set -l line
    if test -n "$start"; and test $start -le (count $tokens)
        set line (string escape -- $tokens[$start..-1])
    end
    set -l current (commandline -ct)
    # While the options go on, a word that begins with a dash is one.
    test -z "$start"; and string match -q -- '-*' $current; and return
    complete --do-complete=(string join -- ' ' $line $current)
end

complete -c nsbox -f
complete -c nsbox -n 'test (count (commandline -opc)) -eq 1' -s h -l help -d 'the words'
complete -c nsbox -n 'test (count (commandline -opc)) -eq 1' -s V -l version -d 'the version'
"""


def _fish() -> str:
    valued = sorted({flag for word in WORDS for flag in _flags(_valued(word.options))})
    anywhere = [word.name for word in WORDS if word.anywhere]
    head = _FISH.replace("@VALUED@", " ".join(valued)).replace("@ANYWHERE@", " ".join(anywhere))
    return head + "".join(line + "\n" for word in WORDS for line in _fish_lines(word))


def _fish_lines(word: Word) -> Iterable[str]:
    start = "complete -c nsbox -n"
    yield f"{start} 'test (count (commandline -opc)) -eq 1' -a {word.name} -d {_fish_quoted(word.summary)}"
    for option in word.options:
        values = values_of(option)
        line = f"{start} '__nsbox_options {word.name}' -l {option.flag[2:]}"
        line += f" -s {option.short[1:]}" if option.short else ""
        if option.kind not in (ON, OFF):
            line += " -r -F" if values.path == "file" else " -x"
            words = [*values.words, *(["(__fish_complete_directories)"] if values.path == "dir" else [])]
            line += f" -a '{' '.join(words)}'" if words else ""
        yield f"{line} -d {_fish_quoted(option.help)}"
    if word.takes == cli_words.COMMAND:
        yield f"{start} '__nsbox_in {word.name}' -a '(__nsbox_command)'"
    elif word.takes in (cli_words.SCRIPT, cli_words.FILES):
        yield f"{start} '__nsbox_in {word.name}' -F"
    elif _positional(word):
        only = f"__nsbox_in {word.name}" + ("" if word.anywhere else "; and test (count (commandline -opc)) -eq 2")
        yield f"{start} '{only}' -a '{' '.join(_positional(word))}'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
