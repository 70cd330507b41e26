"""Profiles: the shipped ones, files of the caller's, how they lie over each other, what is refused."""

import re
import tomllib
from pathlib import Path

import pytest

from nsbox import profiles
from nsbox.binds import Bind, Tmpfs
from nsbox.errors import SpecError
from nsbox.spec import FIELDS, Spec

LIMITS = ("memory", "cpus", "pids", "disk", "files", "file_size", "timeout", "cpu_time", "output")
# Tables of other modules in the same folder.
TABLES = {"seccomp", "guard", "trust"}


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_every_file_is_a_profile_or_a_known_table() -> None:
    files = {path.stem for path in Path(profiles.profiles_dir()).glob("*.toml")}
    assert files - TABLES == set(profiles.names())


def test_default_is_the_default() -> None:
    assert Spec.from_profile("default") == Spec()
    document = tomllib.loads(profiles.text_of("default"))
    # What names something of the caller's has no default worth writing out.
    assert set(document) - {"description"} == FIELDS - {
        *("ro", "rw", "tmpfs", "workspace", "env", "cwd", "require", "degrade"),
        *("secrets", "allow", "allow_sensitive", "allow_trusted", "export", "log", "cpuset", "ionice"),
    }


def test_the_shipped_ones_are_ordered() -> None:
    strict, default, permissive = (Spec.from_profile(name) for name in profiles.names()[:3])
    for name in LIMITS:
        values = [getattr(spec.limits, name) for spec in (strict, default, permissive)]
        assert values == sorted(values, key=lambda value: float("inf") if value is None else value), name
    assert [spec.seccomp for spec in (strict, default, permissive)] == ["strict", "default", "permissive"]
    for spec in (strict, default, permissive):
        assert spec.landlock
        assert (spec.net, spec.root, spec.uid, spec.ro, spec.rw) == ("none", "host", 1000, (), ())


@pytest.mark.parametrize("name", profiles.NAMES)
def test_every_key_says_why(name: str) -> None:
    lines = profiles.text_of(name).splitlines()
    assert profiles.description(name)
    assert lines[0].startswith("#")
    # One comment may stand for keys that follow each other.
    keys = [number for number, line in enumerate(lines) if re.match(r"(?!description|extends)\w+ =", line)]
    assert keys
    for number in keys:
        assert lines[number - 1].startswith("#") or number - 1 in keys, lines[number]


@pytest.mark.parametrize("name", profiles.JOBS)
def test_a_profile_for_a_job_says_why_at_each_key(name: str) -> None:
    lines = profiles.text_of(name).splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r"(?!description|extends)\w+ =", line)]
    assert len(keys) >= 6
    for number in keys:
        assert lines[number - 1].startswith("# "), lines[number]
    spec = Spec.from_profile(name)
    assert spec.landlock
    assert (spec.rw, spec.allow_host_net, spec.secret_env) == ((), False, False)
    assert {"seccomp=kernel", "no_new_privs=kernel", "capabilities=kernel", "mount_ns=kernel"} <= set(spec.require)
    assert None not in (spec.limits.memory, spec.limits.pids, spec.limits.disk, spec.limits.timeout)


def test_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.toml", 'description = "x"\nmemory = "1G"\nro = ["/data"]\n[env]\nA = "1"\n')
    assert profiles.load(path) == {"memory": "1G", "ro": ["/data"], "env": {"A": "1"}}
    assert Spec.from_profile(Path(path), ro=["/more"], env={"B": "2"}).env == {"A": "1", "B": "2"}
    assert Spec.from_profile(path, ro=["/more"]).ro == (Bind("/data"), Bind("/more"))


def test_extends(tmp_path: Path) -> None:
    write(
        tmp_path / "base.toml", 'extends = "strict"\ntmpfs = ["/scratch:1M"]\ntimeout = "1h"\nrequire = ["overlay"]\n'
    )
    path = write(tmp_path / "top.toml", 'extends = "./base.toml"\ntmpfs = ["/other"]\nrequire = ["disk"]\n')
    spec = Spec.from_profile(path)
    assert spec.timeout == 3600.0
    assert spec.seccomp == "strict"
    assert spec.tmpfs == (Tmpfs("/scratch", 1 << 20), Tmpfs("/other"))
    assert spec.require[-2:] == ("overlay", "disk")


def test_of_two_mounts_on_one_place_the_upper_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "p.toml", 'ro = ["/a:/x", "/b:/y"]\ntmpfs = ["/z:1M"]\n')
    spec = Spec.from_profile(path, rw=["/c:/x"], tmpfs="/z:2M")
    assert spec.ro == (Bind("/b", "/y"),)
    assert spec.rw == (Bind("/c", "/x"),)
    assert spec.tmpfs == (Tmpfs("/z", 2 << 20),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory = \n", "not valid TOML.*line 1"),
        ('memory = "1G"\n\nmemroy = "1G"\n', "unknown key 'memroy' in line 3; the options are .*memory"),
        ('[limits]\nmemory = "1G"\n', "unknown key 'limits' in line 1"),
        ('memory = "lots"\n', "memory: 'lots' is not understood"),
        ('net = "host"\n', "net: 'host' gives"),
        ('ro = ["relative:dst"]\n', "ro: the place inside must be absolute"),
        ('extends = "nope"\n', "'nope' is not known"),
        ("extends = 7\n", "'extends' must be text"),
        ('extends = "./p.toml"\n', "leads back"),
        ('extends = "./missing.toml"\n', "missing.toml: No such file"),
    ],
)
def test_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "p.toml", text)
    with pytest.raises(SpecError, match=f"(?s){message}") as caught:
        profiles.load(path)
    assert "p.toml" in str(caught.value) or "missing.toml" in str(caught.value) or "nope" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refused_names(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="'nope' is not known; the shipped ones are strict, default, permissive"):
        profiles.load("nope")
    for name in ("seccomp", "", "a\0b"):
        with pytest.raises(SpecError, match="profile: "):
            profiles.load(name)
    (tmp_path / "latin.toml").write_bytes(b"description = '\xe9'\n")
    with pytest.raises(SpecError, match="not UTF-8 at byte 15"):
        profiles.load(tmp_path / "latin.toml")
    with pytest.raises(SpecError, match="Is a directory"):
        profiles.load(f"{tmp_path}/")


def test_written_and_read_again(tmp_path: Path) -> None:
    spec = Spec(ro=["/a b:/c", "/d\\:e"], env={"K": 'v"\n'}, memory="1G", tmpfs="/t:3M", workspace="/w", landlock=False)
    path = write(tmp_path / "p.toml", spec.to_toml())
    assert Spec.from_profile(path) == spec
