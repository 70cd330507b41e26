"""What the guard refuses, covers and lets through."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nsbox import guard, places, profiles
from nsbox.errors import SpecError
from nsbox.guard import Facts, Verdict

ROOT = Path(__file__).resolve().parents[2]
Look = Callable[..., Verdict]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home directory with some of everything in it."""
    home = tmp_path.resolve() / "homes" / "alice"
    for name in (
        ".ssh/id_ed25519",
        ".aws/credentials",
        ".config/gh/hosts.yml",
        ".kube/config",
        ".netrc",
        "proj/main.py",
    ):
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (home / ".config/nvim").mkdir()
    return home


@pytest.fixture
def known(home: Path, tmp_path: Path) -> Facts:
    return Facts(str(home), (str(home), str(home.parent / "bob")), (str(tmp_path / "state"),), ())


@pytest.fixture
def look(known: Facts) -> Look:
    """look(path, …, allow=[…]) → the verdict on read-only mounts of these."""

    def check(*paths: Path | str, allow: tuple[Path | str, ...] = (), option: str = "ro") -> Verdict:
        binds = [(option, os.path.realpath(path), False) for path in paths]
        return guard.check(binds, [os.path.realpath(path) for path in allow], known)

    return check


def test_an_ordinary_project_passes(look: Look, home: Path) -> None:
    assert look(home / "proj", home / ".config/nvim", "/usr/bin/env") == Verdict()


def test_no_mounts_cost_nothing(known: Facts) -> None:
    assert guard.check([], [], known) == Verdict()


@pytest.mark.parametrize(
    "name", [".ssh", ".ssh/id_ed25519", ".aws", ".aws/credentials", ".config/gh", ".netrc", ".kube/config"]
)
def test_S09_credentials_are_refused_with_reason_and_word(look: Look, home: Path, name: str) -> None:
    verdict = look(home / name)
    (refusal,) = verdict.refusals
    assert refusal.path == refusal.source == str(home / name)
    assert refusal.why
    assert refusal.word == f"--allow-sensitive {home / name}"
    assert refusal.word in str(refusal)
    assert look(home / name, allow=(home / name,)).refusals == ()


def test_S09_every_entry_of_the_table_is_refused(known: Facts, home: Path) -> None:
    raw = places.raw_table(known.home)
    for path in [*(f"{home}/{name}" for name in raw["home"]), *raw["host"], *raw["sockets"], *raw["whole"]]:
        assert guard.check([("rw", path, True)], [], known).refusals, path


def test_S09_whole_homes_of_anybody(look: Look, home: Path) -> None:
    (home.parent / "bob").mkdir()
    for path in (home, home.parent / "bob", home.parent, home.parent.parent, "/"):
        (refusal,) = look(path).refusals
        assert "home" in refusal.why or path == "/"
    assert look(home.parent / "bob" / "shared").refusals == ()


def test_a_home_let_through_has_its_credentials_covered(look: Look, home: Path) -> None:
    verdict = look(home, allow=(home,))
    assert verdict.refusals == ()
    assert [item.path for item in verdict.let_through] == [str(home)]
    covered = {mask.relative: mask.directory for mask in verdict.masks}
    assert covered == {".ssh": True, ".aws": True, ".config/gh": True, ".kube": True, ".netrc": False}
    more = look(home, allow=(home, home / ".kube"))
    assert ".kube" not in {mask.relative for mask in more.masks}
    assert str(home / ".kube") in {item.path for item in more.let_through}


def test_the_word_for_a_home_is_not_the_word_for_its_keys(look: Look, home: Path) -> None:
    assert look(home / ".ssh", allow=(home,)).refusals
    assert not look(home / ".ssh" / "id_ed25519", allow=(home / ".ssh",)).refusals


def test_S09_through_a_parent_directory(look: Look, home: Path) -> None:
    (refusal,) = look(home / ".config").refusals
    assert refusal.path == str(home / ".config/gh")
    assert refusal.source == str(home / ".config")
    assert not look(home / ".config", allow=(home / ".config/gh",)).refusals


def test_S09_through_a_symbolic_link(look: Look, home: Path, tmp_path: Path) -> None:
    (tmp_path / "innocent").symlink_to(home / ".ssh")
    assert look(tmp_path / "innocent").refusals


def test_S09_where_a_link_among_the_places_leads(look: Look, home: Path, tmp_path: Path, known: Facts) -> None:
    vault = tmp_path / "vault"
    vault.mkdir()
    (vault / "key").write_text("x")
    (home / ".gnupg").symlink_to(vault)
    places.table(known).refresh()
    assert look(vault).refusals
    assert look(vault / "key").refusals


def test_S09_sockets(look: Look, tmp_path: Path, known: Facts) -> None:
    place = tmp_path / "plain" / "agent.1"
    place.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        (refusal,) = look(place).refusals
        assert "socket" in refusal.why
        (mask,) = look(place.parent).masks
        assert mask.relative == "agent.1"
    agent = known._replace(environ=(("SSH_AUTH_SOCK", str(tmp_path / "a/s")), ("DOCKER_HOST", "unix:///srv/d.sock")))
    for path in (
        f"{tmp_path}/a/s",
        "/srv/d.sock",
        "/run/docker.sock",
        "/run/dbus/system_bus_socket",
        "/tmp/.X11-unix/X0",
    ):
        assert guard.check([("ro", path, False)], [], agent).refusals, path


def test_own_state(look: Look, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (refusal,) = look(tmp_path / "state").refusals
    assert "nsbox" in refusal.why


@pytest.mark.parametrize(
    "name, covered",
    [
        *(
            (name, True)
            for name in (".env", ".env.local", "id_rsa", "a/b/.netrc", "app.kdbx", "service-account-7.json")
        ),
        *(
            (name, False)
            for name in (".env.example", "a/b/c/.env", "environment", "id_rsa.pub", "key.py", ".environment")
        ),
    ],
)
def test_names_in_a_project_are_covered(look: Look, home: Path, name: str, covered: bool) -> None:
    path = home / "proj" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("TOKEN=1")
    verdict = look(home / "proj", option="workspace")
    assert verdict.refusals == ()
    assert [mask.path for mask in verdict.masks] == ([str(path)] if covered else [])
    assert [mask.relative for mask in verdict.masks] == ([name] if covered else [])
    let = look(home / "proj", option="workspace", allow=(path,))
    assert let.masks == ()
    assert [item.path for item in let.let_through] == ([str(path)] if covered else [])


def test_directories_of_credentials_in_a_project(look: Look, home: Path) -> None:
    (home / "proj/deploy/.ssh").mkdir(parents=True)
    (mask,) = look(home / "proj").masks
    assert (mask.relative, mask.directory) == ("deploy/.ssh", True)


def test_links_in_a_project_are_not_followed(look: Look, home: Path) -> None:
    (home / "proj/.env").symlink_to(home / ".ssh/id_ed25519")
    (home / "proj/dir").symlink_to(home)
    assert look(home / "proj") == Verdict()


def test_a_new_file_is_seen_in_spite_of_the_cache(look: Look, home: Path) -> None:
    for number in range(5):
        assert len(look(home / "proj").masks) == number
        (home / f"proj/.env.{number}").write_text("x")
    assert len(look(home / "proj").masks) == 5


def test_scan_is_bounded(look: Look, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "SCAN_ENTRIES", 20)
    for number in range(40):
        (home / f"proj/{number}").write_text("")
    assert look(home / "proj").truncated == (str(home / "proj"),)


def test_too_many_credentials_are_refused(look: Look, home: Path) -> None:
    for number in range(guard.MAX_MASKS + 1):
        (home / f"proj/.env.{number}").write_text("x")
    assert "more than 64" in str(look(home / "proj").refusals[0])


def test_message_escapes_what_a_terminal_would_obey(known: Facts, home: Path) -> None:
    path = f"{home}/.ssh/\x1b[31m\n"
    text = str(guard.check([("ro", path, False)], [], known).refusals[0])
    assert "\x1b" not in text
    assert "\n" not in text


def test_users_add_to_the_table(look: Look, home: Path, known: Facts) -> None:
    added = home / ".config/nsbox/guard.toml"
    added.parent.mkdir(parents=True)
    added.write_text('[home]\n"diary" = "private"\n[names]\n"*.secret" = "ours"\n[host]\n"/srv/ours" = "ours too"\n')
    (home / "proj/a.secret").write_text("x")
    assert "private" in str(look(home / "diary").refusals[0])
    assert look("/srv/ours/x").refusals
    assert [mask.relative for mask in look(home / "proj").masks] == ["a.secret"]
    assert look(home / ".ssh").refusals


@pytest.mark.parametrize(
    "text, says",
    [
        ("[home", "not valid TOML"),
        ("[nonsense]\na='b'", "unknown section"),
        ("home = 3", "wants lines"),
        ("[home]\na = 3", "wants lines"),
        ("[host]\na = 'b'", "absolute"),
    ],
)
def test_a_bad_table_is_said_and_not_passed_over(look: Look, home: Path, text: str, says: str) -> None:
    added = home / ".config/nsbox/guard.toml"
    added.parent.mkdir(parents=True)
    added.write_text(text)
    with pytest.raises(SpecError, match=says):
        look(home / "proj")


def test_sensitive_and_variable(known: Facts, home: Path) -> None:
    assert guard.sensitive(str(home / ".ssh/config"), known)
    assert guard.sensitive(str(home), known)
    assert guard.sensitive(str(home / "proj"), known) is None
    assert guard.variable("GITHUB_TOKEN", known)
    assert guard.variable("PATH", known) is None


def test_facts_of_this_host() -> None:
    found = guard.facts("/run/nsbox", {"HOME": "/root", "SSH_AUTH_SOCK": "/tmp/a", "EDITOR": "vi"})
    assert "/run/nsbox" in found.own
    assert "/" not in found.homes
    assert found.environ == (("SSH_AUTH_SOCK", "/tmp/a"),)
    assert ("/root" in found.homes) == os.path.isdir("/root")


@pytest.mark.parametrize(
    "value, found",
    [
        ("unix:path=/run/user/1/bus,guid=77", ["/run/user/1/bus"]),
        ("unix:///run/docker.sock", ["/run/docker.sock"]),
        ("/a/k1:/b/../k2", ["/a/k1", "/k2"]),
        ("tcp://host:22", []),
        ("/", []),
        ("/tmp/agent:12:1", ["/tmp/agent"]),
    ],
)
def test_paths_in_variables(value: str, found: list[str]) -> None:
    assert places.paths_in(value) == found


def test_the_tables_are_no_profiles() -> None:
    assert "guard" not in profiles.names()


def test_budget(look: Look, home: Path) -> None:
    (home / "proj/src").mkdir()
    time.sleep(0.05)
    look(home / "proj")
    took = []
    for _ in range(50):
        began = time.perf_counter()
        look(home / "proj")
        took.append(time.perf_counter() - began)
    # 60 µs on an idle machine; the quickest look is one that nobody has interrupted.
    assert min(took) < 0.001


IN_A_NAMESPACE = """
import os, subprocess, sys
from nsbox import guard
from nsbox.guard import Facts
top = sys.argv[1]
home = top + "/homes/alice"
for name in ("hidden", "tree/inner", "chroot/proc", "copy"):
    os.makedirs(f"{top}/{name}")
def mount(*words): subprocess.run(["mount", *words], check=True)
mount("--bind", home + "/.ssh", top + "/hidden")
mount("--bind", home + "/.aws", top + "/tree/inner")
mount("--bind", top + "/homes", top + "/copy")
known = Facts(home, (home,), (), ())
def refused(path, option="ro"):
    found = guard.check([(option, path, False)], [], known).refusals
    return found[0].path.replace(top, "") if found else None
print(*(refused(top + p) for p in ("/hidden", "/hidden/id_ed25519", "/tree")), refused(top + "/tree", "workspace"))
print(*(refused(top + "/copy" + path) for path in ("", "/alice", "/alice/.kube", "/alice/proj")))
mount("-t", "tmpfs", "none", top + "/chroot/proc")
print(refused(top + "/chroot"))
"""


def test_S09_bind_mounts_do_not_hide_a_place(home: Path, tmp_path: Path) -> None:
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be had here")
    done = subprocess.run(
        [*unshare, sys.executable, "-c", IN_A_NAMESPACE, str(tmp_path.resolve())],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [
        "/hidden /hidden/id_ed25519 /tree/inner None",
        "/copy /copy/alice /copy/alice/.kube None",
        "None",
    ], done.stderr
