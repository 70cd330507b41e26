"""The option --full, and the table of what was found in the virtual machines."""

import json
import os

import pytest

from . import vm

# Elsewhere those would depend on whatever the host is.
collect_ignore = [] if "NSBOX_IN_VM" in os.environ else ["inside"]

#: one row for each pass: see test_vm.py
rows = pytest.StashKey[list[dict[str, str]]]()
COLUMNS = ("kernel", "caller", "tests", "memory", "pids", "cpu", "landlock", "overlay", "root layer")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--brief", action="store_true", help="the most telling tests in two virtual machines")
    parser.addoption("--full", action="store_true", help="all tests in every virtual machine: for many hours; -k picks")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[rows] = []


def table(found: list[dict[str, str]]) -> list[str]:
    """Lines with the columns under each other."""
    lines = [COLUMNS, *(tuple(row.get(name, "") for name in COLUMNS) for row in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash[rows]
    if not found:
        return
    terminalreporter.section("virtual machines")
    for line in table(found):
        terminalreporter.write_line(line)
    path = vm.cache() / "results.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    terminalreporter.write_line(f"also in {path}")
