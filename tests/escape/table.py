"""The table of attacks in docs/threat-model.md, made of the tests and of what their runs came to.

    python -m tests.escape.table --write
        puts it into the document, and the numbers into README.md
    python -m tests.escape.table --record FILE...
        takes results in: of pytest --junitxml, or of nsbox selftest --json. Either says on which kernel and for which
        caller it was made. Several files of the same are one run; of a test that is in two of them, the later counts.

The attacks and controls are those of nsbox.selftest.catalogue; a test belongs to an attack by its name. Results are
kept in results.json beside this file, by kernel, caller and attack.
"""

import ast
import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from nsbox.selftest.attempted import ATTEMPTS
from nsbox.selftest.catalogue import BY_ID, THREATS

TESTS = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results.json")
DOCUMENT = TESTS.parent / "docs/threat-model.md"
README = TESTS.parent / "README.md"
BEGIN, END = "<!-- attacks: made by python -m tests.escape.table --write -->\n", "<!-- end of attacks -->\n"
COUNT = re.compile(r"(?<=<!-- attacks counted -->\n).*?(?=<!-- end -->)", re.DOTALL)

#: kernel → caller → attack → [stopped, not stopped, not possible there]
Results = dict[str, dict[str, dict[str, list[int]]]]
#: (attack, test or attempt) → the column in such a list
Outcomes = dict[tuple[str, str], int]


class Row(NamedTuple):
    """What the tests say of one attack."""

    tests: int = 0
    #: tests that only one kind of caller can make
    root: int = 0
    user: int = 0


def ids(name: str) -> list[str]:
    """The attacks that a test is about, by its name: test_F05_F06_… is about two."""
    found = re.match(r"test((?:_[KFNRS]\d\d)+)(?:_|\b)", name)
    return [item for item in found[1].split("_")[1:] if item in BY_ID] if found else []


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@functools.cache
def rows() -> dict[str, Row]:
    """The tests of each attack, as they stand in the files."""
    found = {threat.id: Row() for threat in THREATS}
    for path in sorted(TESTS.rglob("test_*.py")):
        if path.parent.name == "cases":
            continue
        for function in _functions(path):
            marks = {ast.unparse(mark).removeprefix("pytest.mark.") for mark in function.decorator_list}
            for item in ids(function.name):
                row = found[item]
                found[item] = Row(row.tests + 1, row.root + ("root" in marks), row.user + ("user" in marks))
    return found


def results() -> Results:
    """What the recorded runs came to."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def kernel(release: str) -> str:
    """The part of a release that says which kernel it is: 6.12."""
    return ".".join(release.split(".")[:2])


def _version(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(".")))


def _stopped(threat: str, known: Results) -> str:
    """Where an attack was stopped: the callers, and the kernels of each."""
    parts = []
    for caller in ("root", "user"):
        good, bad = [], []
        for name in sorted(known, key=_version):
            stopped, through, _ = known[name].get(caller, {}).get(threat, [0, 0, 0])
            if through:
                bad.append(name)
            elif stopped:
                good.append(name)
        parts += [f"{caller}: {', '.join(good)}"] if good else []
        parts += [f"{caller}: NOT on {', '.join(bad)}"] if bad else []
    return "; ".join(parts) or "not recorded"


def table() -> str:
    """The table, as Markdown."""
    known, tests = results(), rows()
    lines = ["| | attack | control | attempts, tests | stopped |", "|---|---|---|---|---|"]
    for threat in THREATS:
        calls = sum(item.threat == threat.id for item in ATTEMPTS)
        amount = f"{calls}, {tests[threat.id].tests}" if calls else f"{tests[threat.id].tests}"
        told = _stopped(threat.id, known) if tests[threat.id].tests else f"not attempted: {threat.left}"
        cells = (threat.id, threat.attack, threat.control, amount, told)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def count() -> str:
    """The numbers, in a sentence."""
    known = results()
    shown = [
        f"{name} ({len(set().union(*(known[name][caller] for caller in known[name])))} of them)"
        for name in sorted(known, key=_version)
    ]
    named = f"Linux {', '.join(shown)}"
    tests = sum(row.tests for row in rows().values())
    made = sum(1 for row in rows().values() if row.tests)
    return (
        f"{made} of {len(THREATS)} attacks are attempted, as root and as an ordinary user: by {len(ATTEMPTS)}\n"
        f"attempts of one call, each with a control, under three policies, and by {tests} tests. Runs are recorded on\n"
        f"{named}.\n"
    )


def written(text: str) -> str:
    """The document with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}{table()}{END}{after}"


def write() -> None:
    """Put table and numbers into the documents."""
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
    README.write_text(COUNT.sub(count().replace("\\", "\\\\"), README.read_text()))


def of_junit(text: str) -> tuple[str, str, Outcomes]:
    """Kernel, caller, and what a file that pytest wrote says of each test: passed, failed, skipped."""
    columns = {"failure": 1, "error": 1, "skipped": 2}
    root = ElementTree.fromstring(text)
    told = {item.get("name"): item.get("value", "") for item in root.iter("property")}
    found: Outcomes = {}
    for case in root.iter("testcase"):
        column = next((columns[child.tag] for child in case if child.tag in columns), 0)
        name = case.get("name", "")
        for item in ids(name.partition("[")[0]):
            found[item, f"{case.get('classname')}::{name}"] = column
    return told["kernel"], told["caller"], found


def of_selftest(text: str) -> tuple[str, str, Outcomes]:
    """Kernel, caller, and what a self-test says of each attempt: stopped, through, absent or not shown."""
    document = json.loads(text)
    columns = {"stopped": 0, "through": 1}
    found = {
        (item["id"], f"{document['profile']} {number}"): columns.get(item["result"], 2)
        for number, item in enumerate(document["attempts"])
    }
    return document["kernel"], document["caller"], found


def record(paths: list[str]) -> None:
    """Take the results of runs in; what was known of the same kernel and caller is replaced, attack by attack."""
    taken: dict[tuple[str, str], Outcomes] = {}
    for path in paths:
        text = Path(path).read_text()
        release, who, found = (of_selftest if text.lstrip().startswith("{") else of_junit)(text)
        taken.setdefault((kernel(release), "root" if who == "root" else "user"), {}).update(found)
    known = results()
    for (name, caller), outcomes in taken.items():
        counts: dict[str, list[int]] = {}
        for (attack, _), column in outcomes.items():
            counts.setdefault(attack, [0, 0, 0])[column] += 1
        known.setdefault(name, {}).setdefault(caller, {}).update(counts)
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main(words: list[str]) -> int:
    if words[:1] == ["--record"] and len(words) > 1:
        record(words[1:])
    elif words == ["--write"]:
        write()
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
