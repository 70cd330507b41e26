"""The tutorial and the guides tell the truth: every block of code in them is run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _examples import FENCE, LANGUAGES, blocks, put_nsbox_into

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("tutorial", "guides/terminals", "guides/snapshots", "guides/services", "guides/pools", "guides/frameworks")
# These have files that a test makes first: tests/host/test_jobs.py; or are run in the test's own process: test_box.py,
# test_python_pool.py.
ELSEWHERE = (
    "guides/coding-agent",
    "guides/data-analysis",
    "guides/documents",
    "guides/sandboxes",
    "guides/python-pool",
)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs(page: str, tmp_path: Path) -> None:
    if page == "guides/frameworks":
        pytest.importorskip("anyio", reason="anyio is not installed")
        pytest.importorskip("trio", reason="trio is not installed")
    folder = tmp_path / "here"
    folder.mkdir()
    tmp_path.chmod(0o755)
    path = f"{put_nsbox_into(tmp_path / 'bin')}:{os.environ['PATH']}"
    script = Path(__file__).with_name("_examples.py")
    env = {**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("NSBOX_LOG", None)
    done = subprocess.run(
        [sys.executable, script, DOCS / f"{page}.md"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_left_out(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    found = blocks(text)
    assert len(found) >= 2
    assert {language for language, _ in found} <= {*LANGUAGES, "text"}
    # An indented block would be code that nobody runs.
    assert not re.search(r"^\n    \S", FENCE.sub("", text), re.MULTILINE)
    assert text.count("```") == 2 * len(found)


def test_every_guide_is_run_and_listed() -> None:
    written = {f"guides/{path.stem}" for path in (DOCS / "guides").iterdir()} | {"tutorial"}
    assert {*PAGES, *ELSEWHERE} == {page for page in written if blocks((DOCS / f"{page}.md").read_text())}
    for listing in (DOCS / "index.md", DOCS.parent / "README.md"):
        text = listing.read_text()
        assert {page for page in written if page not in text} == set(), listing.name


def test_every_page_is_in_the_table_of_contents() -> None:
    for listing in (DOCS / "index.md", DOCS.parent / "README.md"):
        text = listing.read_text()
        for page in DOCS.glob("*.md"):
            assert page.stem in text or page.stem in ("index", "reference"), f"{listing.name}: {page.name}"


def test_links_lead_somewhere() -> None:
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
