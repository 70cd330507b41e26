"""The table of attacks says what the tests say, and every attack has tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from nsbox.selftest.catalogue import THREATS
from tests.escape import table


def test_the_document_holds_the_table_as_it_would_be_made_now() -> None:
    text = table.DOCUMENT.read_text()
    assert table.BEGIN in text
    assert table.END in text
    assert text == table.written(text), "run: python -m tests.escape.table --write"


def test_the_readme_holds_the_numbers() -> None:
    found = table.COUNT.search(table.README.read_text())
    assert found
    assert found[0] == table.count(), "run: python -m tests.escape.table --write"


@pytest.mark.parametrize("threat", [threat.id for threat in THREATS])
def test_every_attack_has_a_test_for_everybody(threat: str) -> None:
    row = table.rows()[threat]
    assert row.tests > row.root + row.user, "or only for some callers"


def test_names_and_ids() -> None:
    assert table.ids("test_F05_F06_nothing_that_was_planted") == ["F05", "F06"]
    assert table.ids("test_K01_io_uring") == ["K01"]
    assert table.ids("test_F21_identity") == []  # of the field cases
    assert table.ids("test_names") == []
    assert table.kernel("6.12.3-amd64") == "6.12"


def test_what_runs_came_to() -> None:
    cases = '<testcase name="test_K01_io_uring[a]"/><testcase name="test_K01_io_uring[b]"><failure/></testcase>'
    cases += '<testcase name="test_K02_x"><skipped/></testcase><testcase name="test_other"/>'
    assert table.of_junit(f"<testsuites><testsuite>{cases}</testsuite></testsuites>") == {
        "K01": [1, 1, 0],
        "K02": [0, 0, 1],
    }
    attempts = [{"id": "K01", "result": result} for result in ("stopped", "stopped", "absent", "through")]
    assert table.of_selftest({"attempts": attempts}) == {"K01": [2, 1, 1]}
