"""The table of attacks says what the tests say, and every attack has tests."""

import json
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


def _junit(kernel: str, caller: str, cases: str) -> str:
    told = f'<property name="kernel" value="{kernel}"/><property name="caller" value="{caller}"/>'
    return f"<testsuites><testsuite><properties>{told}</properties>{cases}</testsuite></testsuites>"


def test_what_runs_came_to() -> None:
    cases = '<testcase name="test_K01_io_uring[a]"/><testcase name="test_K01_io_uring[b]"><failure/></testcase>'
    cases += '<testcase name="test_K02_x"><skipped/></testcase><testcase name="test_other"/>'
    release, caller, found = table.of_junit(_junit("6.1.0-50-amd64", "uid 5", cases))
    assert (release, caller) == ("6.1.0-50-amd64", "uid 5")
    assert [(attack, column) for (attack, _), column in found.items()] == [("K01", 0), ("K01", 1), ("K02", 2)]
    results = ("stopped", "stopped", "absent", "through")
    attempts = [{"id": "K01", "attack": "the same", "result": text} for text in results]
    document = {"kernel": "6.12.3", "caller": "root", "profile": "default", "attempts": attempts}
    release, caller, found = table.of_selftest(json.dumps(document))
    assert (release, caller, list(found.values())) == ("6.12.3", "root", [0, 0, 2, 1])


def test_files_of_the_same_kernel_and_caller_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results.json")
    table.RESULTS.write_text('{"6.1": {"user": {"K01": [9, 9, 9], "K03": [5, 0, 0]}}}')
    files = [tmp_path / "one", tmp_path / "two", tmp_path / "root"]
    failed = '<testcase name="test_K01_a"/><testcase name="test_K01_c"><failure/></testcase>'
    files[0].write_text(_junit("6.1.0-50-amd64", "uid 5", failed))
    again = '<testcase name="test_K01_b"><skipped/></testcase><testcase name="test_K01_c"/>'
    files[1].write_text(_junit("6.1.0-50-amd64", "uid 5", again))
    files[2].write_text(_junit("6.1.0-50-amd64", "root", '<testcase name="test_K01_b"><error/></testcase>'))
    table.record(list(map(str, files)))
    user = {"K01": [2, 0, 1], "K03": [5, 0, 0]}
    assert table.results() == {"6.1": {"root": {"K01": [0, 1, 0]}, "user": user}}
