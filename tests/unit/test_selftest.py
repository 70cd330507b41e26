"""What the self-test makes of its attempts, and that everything about them is told in one place."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsbox import cli
from nsbox.selftest import attempted, catalogue, render, runner
from nsbox.selftest.stage import Noted, noted, parse

DOCUMENT = Path(__file__).parents[2] / "docs/selftest.md"


def report(*attempts: Noted, **left: str) -> runner.Report:
    return runner.Report("default", attempts, left, 1.0)


def one(threat: str, result: str) -> Noted:
    return Noted(threat, "something", "done", "EPERM", result)


def test_every_attempt_belongs_to_a_threat_and_is_known_to_the_program() -> None:
    from nsbox.selftest.attempts import files, interfaces, kernel, reach  # noqa: F401  # they register
    from nsbox.selftest.attempts.calls import ATTACKS

    names = [item.name for item in attempted.ATTEMPTS]
    assert len(names) == len(set(names))
    assert set(names) <= ATTACKS.keys()
    assert {item.threat for item in attempted.ATTEMPTS} <= catalogue.BY_ID.keys()


def test_every_threat_is_attempted_or_says_why_not() -> None:
    for name in ("on_files", "on_network", "on_limits", "on_secrets"):
        __import__(f"nsbox.selftest.{name}")
    made = runner.STAGED.keys() | {item.threat for item in attempted.ATTEMPTS}
    assert made == made & catalogue.BY_ID.keys()
    assert {threat.id for threat in catalogue.THREATS if not threat.left} <= made


@pytest.mark.parametrize(
    "control, inside, verdict",
    [
        ("done", "EPERM", "stopped"),
        ("done", "done", "through"),
        ("done", "EINVAL", "through"),
        ("done", "", "through"),
        ("EPERM", "EPERM", "no control"),
        ("ENOSYS", "ENOSYS", "absent"),
        ("ENOSYS", "EPERM", "absent"),
        ("ENOSYS", "done", "through"),
    ],
)
def test_judge(control: str, inside: str, verdict: str) -> None:
    item = attempted.Attempt("K05", "unshare_user", ("done",), ("EPERM",))
    assert attempted.judge(item, control, inside) == verdict


def test_what_got_through_is_through_without_a_control_too() -> None:
    told: dict[str, Any] = {"control": "", "inside": "EPERM"}
    assert noted("K01", "x", works=False, stopped=False, **told).result == "through"
    assert noted("K01", "x", works=False, stopped=True, **told).result == "not shown"
    assert noted("K01", "x", works=True, stopped=True, **told).result == "stopped"
    assert noted("K01", "x", works=True, stopped=False, control="", inside="").result == "not shown", "not reached"


def test_who_was_answered_has_been_counted() -> None:
    from nsbox.selftest.attempts import reach
    from nsbox.selftest.on_network import Service

    with Service() as service:
        for number in range(0, 200, 2):
            assert reach.connect(f"127.0.0.1:{service.port}") == "done"
            assert service.came == number + 1
            assert reach.datagram(f"127.0.0.1:{service.port}") == "done"
            assert service.came == number + 2


def test_controls_write_nothing_on_the_host() -> None:
    # In namespaces of our own whose /usr and /tmp are overlays: what would be written can be seen there.
    if not shutil.which("unshare"):
        pytest.skip("unshare(1) of util-linux is not installed")
    script = """
        set -e
        mount -t tmpfs none /mnt
        for place in usr tmp; do
            mkdir /mnt/$place /mnt/$place-work
            mount -t overlay -o lowerdir=/$place,upperdir=/mnt/$place,workdir=/mnt/$place-work none /$place
        done
        "$0" -m attempts --control "$@"
        find /mnt/usr /mnt/tmp
    """
    names = [item.name for item in attempted.ATTEMPTS if item.threat in ("K12", "F07", "F09")]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(runner.__file__).parent), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, sys.executable, *names]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "remount_usr_writable done" in done.stdout
    assert "double_chroot done" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("/")] == ["/mnt/usr", "/mnt/tmp"]


def test_lines_of_the_program() -> None:
    found = parse(b"mount EPERM\nconnect:127.0.0.1:80 done\nnothing\nhog_memory:3 took 3\n")
    assert found["mount"] == "EPERM"
    assert found["connect:127.0.0.1:80"] == found["connect"] == "done"
    assert found["hog_memory"] == "took 3"


def test_the_verdict_in_words() -> None:
    good = report(
        one("K01", "stopped"), one("K01", "stopped"), one("K12", "absent"), N03="it takes more", N04="it takes more"
    )
    text = render.conclusion(good)
    assert text.startswith("1 attacks attempted in 2 ways, 1 stopped; 1 ways are to what this kernel does not have")
    assert "not attempted: N03, N04 because it takes more" in text
    bad = report(one("K01", "stopped"), one("K01", "through"), one("K02", "stopped"), one("F01", "not shown"))
    assert "2 attacks attempted in 3 ways, 1 stopped; GOT THROUGH: K01" in render.conclusion(bad)
    assert "F01 because their controls do not work here" in render.conclusion(bad)
    assert runner.verdict(bad.attempts) == "through"
    assert runner.verdict(good.attempts) == "stopped"
    assert "through: something: outside done, inside EPERM" in render.text(bad, False, False)


def test_the_document_for_machines_is_as_documented() -> None:
    document = json.loads(render.to_json(report(one("K01", "stopped"), N03="it takes more")))
    assert document["attempts"][0].keys() == {"id", "attack", "control", "inside", "result"}
    assert document["not_attempted"] == [{"id": "N03", "reason": "it takes more"}]
    described = set(re.findall(r"^\| `([a-z_]+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert described == document.keys() | document["attempts"][0].keys() | document["not_attempted"][0].keys()


@pytest.mark.parametrize("result, status", [("stopped", 0), ("not shown", 0), ("through", 1)])
def test_exit_status(
    result: str, status: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(runner, "run", lambda profile: asked.append(profile) or report(one("K01", result)))
    assert cli.call(["selftest", "--profile", "strict"]) == status
    assert asked == ["strict"]
    assert "K01" in capfd.readouterr().out


def test_bad_words_are_no_findings(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["selftest", "K01"]) == 125
    assert cli.call(["selftest", "--profile", "/nonexistent"]) == 125
    assert "/nonexistent" in capfd.readouterr().err


def test_attempts_need_nothing_of_the_package() -> None:
    """Inside there is only their folder."""
    for path in Path(attempted.__file__).with_name("attempts").glob("*.py"):
        assert not re.search(r"^\s*(from|import) nsbox", path.read_text(), re.MULTILINE), path
