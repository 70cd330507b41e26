"""docs/nsbox.1 is what the tables say, well-formed, and installed."""

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from nsbox.cli_options import PYTHON
from nsbox.cli_words import EXIT_STATUS, WORDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/nsbox.1"


@pytest.fixture(scope="module")
def man() -> ModuleType:
    spec = importlib.util.spec_from_file_location("man", ROOT / "docs/man.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tool(*command: str) -> subprocess.CompletedProcess[str]:
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    env = {"PATH": "/usr/bin:/bin", "MANWIDTH": "200", "LC_ALL": "C.UTF-8"}
    return subprocess.run([*command, str(PAGE)], capture_output=True, text=True, check=False, env=env)


def test_the_page_is_as_generated(man: ModuleType) -> None:
    assert PAGE.read_text() == man.page(), "run: python docs/man.py"


def test_every_variable_of_ours_is_told(man: ModuleType) -> None:
    source = "".join(path.read_text() for path in (ROOT / "nsbox").rglob("*.py"))
    told = {name for name, _ in man.ENVIRONMENT}
    found = set(re.findall(r'environ(?:\.get\(|\[)"((?:NSBOX|XDG)_\w+)"', source))
    assert "NSBOX_LOG" in found
    assert found <= told


@pytest.mark.parametrize("command", [["groff", "-man", "-ww", "-Tutf8", "-z"], ["man", "--warnings", "-l"]], ids=str)
def test_groff_has_nothing_to_say(command: list[str]) -> None:
    done = tool(*command)
    assert (done.returncode, done.stderr) == (0, "")


def test_mandoc_has_nothing_to_say() -> None:
    done = tool("mandoc", "-T", "lint")
    # The page says which version it is of; a date would be one more thing that goes stale.
    assert [line for line in done.stdout.splitlines() if "missing date" not in line] == []


def test_a_reader_sees_all_of_it() -> None:
    text = tool("man", "--no-hyphenation", "--no-justification", "-l").stdout
    text = re.sub(r".\x08|\x1b\[[0-9;]*m", "", text)
    for option in {option for word in WORDS for option in word.options} | set(PYTHON):
        assert re.search(rf"^ +(-\w, )?{option.flag}( {re.escape(option.metavar)})?$|{option.flag}( |$)", text, re.M)
        assert " ".join(option.help.split()) in " ".join(text.split())
    for word in WORDS:
        assert f"nsbox {word.name}" in text
        assert word.text in " ".join(text.split())
    for status, _ in EXIT_STATUS[1:]:
        assert re.search(rf"^ +{re.escape(status)} ", text, re.M)


def test_the_wheel_has_it() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["data-files"] == {"share/man/man1": ["docs/nsbox.1"]}
