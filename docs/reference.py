"""What the API reference holds: everything in ``nsbox.__all__``, and what that gives back. Its texts are docstrings.

``docs/conf.py`` puts ``text()`` into ``reference.md`` when the documentation is built; a new public name is in it
without anybody writing it down here.
"""

import importlib
import inspect
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import nsbox
from nsbox.cli_options import OFF, RUN
from nsbox.spec import FIELDS, Spec

#: What the public names take or give back, by where it is defined.
ALSO = (
    "nsbox.process.Process",
    "nsbox.shell.Shell",
    "nsbox.shell.ShellResult",
    "nsbox.files.Files",
    "nsbox.rooted.Entry",
    "nsbox.find.Match",
    "nsbox.archive.Skipped",
    "nsbox.snapshot.Snapshot",
    "nsbox.ports.Forward",
    "nsbox.change.ChangeSet",
    "nsbox.change.Change",
    "nsbox.outgoing.Exported",
    "nsbox.outgoing.Applied",
    "nsbox.outgoing.Held",
    "nsbox.aio.AsyncProcess",
    "nsbox.python_pool.PythonSession",
    "nsbox.spec.Limits",
    "nsbox.stock.Counts",
    "nsbox.python_pool.Raised",
    "nsbox.executor.TaskFailed",
    "nsbox.python_env.of",
    "nsbox.python_env.PythonEnvironment",
)
#: Members that other modules of ours call; nobody else has a reason to.
INTERNAL = {
    "Sandbox": ("forget", "ran_out_of_memory"),
    "Process": ("advance", "end_input", "fail", "input", "settle", "watched"),
    "Files": ("as_payload", "create", "full", "open", "open_regular", "parent"),
    "Pool": ("lease", "take"),
    "PythonPool": ("call",),
    "Spec": ("host_paths", "mounts", "processors", "without_values"),
    "Bind": ("parse",),
    "Tmpfs": ("parse",),
    "Secret": ("read", "written"),
}
#: Options that only Python has.
PYTHON_ONLY = {
    "subids": "true: subordinate ids of the caller's (newuidmap) are ids inside, beside the one",
    "lifetime": "seconds, or a text as 1h, that a sandbox which stays may exist",
}
MARK = "<!-- every public name -->"


def names() -> list[str]:
    """Dotted names of all that is documented, public ones first."""
    return [*(f"nsbox.{name}" for name in nsbox.__all__), *ALSO]


def resolve(name: str) -> Any:
    """The object of a dotted name."""
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except AttributeError:
        return importlib.import_module(name)


def members(name: str) -> dict[str, Any]:
    """The public members of a class or module that are its own to document, by name, as they are defined."""
    thing = resolve(name)
    skipped = INTERNAL.get(name.rpartition(".")[2], ())
    found: dict[str, Any] = {}
    if isinstance(thing, ModuleType):
        own = {key: value for key, value in vars(thing).items() if getattr(value, "__module__", "") == thing.__name__}
        return {key: value for key, value in own.items() if not key.startswith("_") and callable(value)}
    for base in reversed(inspect.getmro(thing) if inspect.isclass(thing) else ()):
        if base.__module__.startswith("nsbox"):
            found |= {key: value for key, value in vars(base).items() if _is_call(value)}
    return {key: value for key, value in found.items() if not key.startswith("_") and key not in skipped}


def _is_call(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)


def fields(frozen: Any) -> str:
    """The fields of a class of ``nsbox.frozen``, as a signature has them; of a Spec, which has a table, none."""
    if frozen is Spec:
        return "**options"
    given = [name + (f"={vars(frozen)[name]!r}" if name in vars(frozen) else "") for name in frozen.__annotations__]
    return ", ".join(given)


def text() -> str:
    """The reference, as reStructuredText within Markdown."""
    public, more = names()[: len(nsbox.__all__)], names()[len(nsbox.__all__) :]
    return "\n".join([*_section("Public names", public), *_section("What they take and give back", more)])


def _section(title: str, entries: Iterable[str]) -> Iterable[str]:
    yield f"## {title}\n"
    for name in entries:
        yield f"### {name.rpartition('.')[2]}\n\n```{{eval-rst}}"
        yield from _directive(name)
        yield "```\n"
        if name == "nsbox.Spec":
            yield from _options()


def _directive(name: str) -> Iterable[str]:
    thing = resolve(name)
    if not inspect.isclass(thing) and not isinstance(thing, ModuleType):
        yield f".. autofunction:: {name}"
        return
    yield f".. auto{'class' if inspect.isclass(thing) else 'module'}:: {name}"
    yield "   :members:"
    if inspect.isclass(thing):
        yield "   :inherited-members: tuple, BaseException, Executor"
    if INTERNAL.get(name.rpartition(".")[2]):
        yield f"   :exclude-members: {', '.join(INTERNAL[name.rpartition('.')[2]])}"


def _options() -> Iterable[str]:
    """The fields of Spec, as the command line's table tells them."""
    told = {option.key: (option.metavar, option.help) for option in RUN if option.kind != OFF}
    told |= {option.key: ("", f"false: {option.help}") for option in RUN if option.kind == OFF}
    told |= {name: ("", text) for name, text in PYTHON_ONLY.items()}
    default = Spec()
    yield "| option | as text | default | what it is |\n|---|---|---|---|"
    for name in sorted(FIELDS):
        form, text = told[name]
        cells = [f"`{name}`", f"`{form}`" if form else "", f"`{getattr(default, name)!r}`", text]
        yield "| " + " | ".join(re.sub(r"([|\\])", r"\\\1", cell) for cell in cells) + " |"
    yield ""
