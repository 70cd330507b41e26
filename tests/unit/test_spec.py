"""Spec: what it accepts, what it refuses and in which words, and that it survives being written down."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsbox.binds import Bind, Tmpfs, split_pair, target_text
from nsbox.errors import NsboxError, SpecError
from nsbox.spec import FIELDS, LAYERS, Limits, Spec


def test_every_limit_has_a_default_that_is_on() -> None:
    limits = Spec().limits
    assert limits == Limits()
    for name in Limits.__match_args__:
        assert getattr(limits, name) is not None or name in ("file_size", "io"), name  # these two by choice


def test_unlimited_is_explicit() -> None:
    names = Limits.__match_args__
    limits = Spec(**dict.fromkeys(names, "unlimited")).limits
    assert all(getattr(limits, name) is None for name in names)
    for name in names:
        with pytest.raises(SpecError, match=f"^{name}: "):
            Spec(**{name: None})


def test_a_spec_is_frozen_hashable_and_equal_by_value() -> None:
    one, other = Spec(ro=["/a"], env={"A": "1"}, memory="1G"), Spec(memory=1 << 30, env={"A": "1"}, ro="/a")
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other, Spec()}) == 2
    with pytest.raises(AttributeError):
        one.memory = 1  # type: ignore[misc]


def test_the_caller_cannot_change_it_from_behind() -> None:
    env, ro = {"A": "1"}, ["/a"]
    spec = Spec(env=env, ro=ro)
    env["B"] = "2"
    ro.append("/b")
    assert spec.env == {"A": "1"}
    assert spec.ro == (Bind("/a"),)


def test_replace_checks_anew() -> None:
    assert Spec().replace(memory="1G").memory == 1 << 30
    with pytest.raises(SpecError, match="memory"):
        Spec().replace(memory="-1")
    with pytest.raises(SpecError, match="unknown option 'memroy'"):
        Spec().replace(memroy="1G")


# ---- mounts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("a", ("a", None)),
        ("a:/b", ("a", "/b")),
        (r"a\:b", ("a:b", None)),
        (r"a\:b:/c\:d", ("a:b", "/c:d")),
        (r"a\\:/b", ("a\\", "/b")),
        (r"a\b", (r"a\b", None)),
        ("a b,c\n:/d", ("a b,c\n", "/d")),
        ("a\udcff:/b\udcfe", ("a\udcff", "/b\udcfe")),
        ("日本:/本", ("日本", "/本")),
    ],
)
def test_pairs(text: str, pair: tuple[str, str | None]) -> None:
    assert split_pair("ro", text) == pair


@pytest.mark.parametrize("text", [":", "a:", ":/b", "a:/b:/c", "::", ""])
def test_bad_pairs(text: str) -> None:
    with pytest.raises(SpecError, match=r"^ro: "):
        Spec(ro=[text])


@pytest.mark.parametrize(
    "value", ["/a:/b", ("/a", "/b"), ["/a", "/b"], Bind("/a", "/b"), (Path("/a"), Path("/b")), (b"/a", "/b")]
)
def test_forms_of_a_bind(value: Any) -> None:
    assert Spec(ro=[value]).ro == (Bind("/a", "/b"),)


def test_a_path_object_is_a_source_whatever_it_holds() -> None:
    assert Spec(ro=Path("/a:b")).ro == (Bind("/a:b"),)
    assert Spec(ro=b"/a\xff").ro == (Bind("/a\udcff"),)
    assert Spec(workspace=Path("/a:b")).workspace == Bind("/a:b", "/work")


@pytest.mark.parametrize(
    ("given", "normal"), [("/a/", "/a"), ("//a//b", "/a/b"), ("/./a/.", "/a"), ("/a\nb", "/a\nb"), ("/...", "/...")]
)
def test_targets_are_normalised(given: str, normal: str) -> None:
    assert target_text("x", given) == normal
    assert Spec(tmpfs=given.replace(":", r"\:")).tmpfs == (Tmpfs(normal),)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("b", "must be absolute"),
        ("./b", "must be absolute"),
        ("/", "root itself"),
        ("//.", "root itself"),
        ("/a/..", "contains '..'"),
        ("/../a", "contains '..'"),
        ("/a\0b", "NUL"),
    ],
)
def test_bad_targets(target: str, message: str) -> None:
    for options in ({"ro": [("/s", target)]}, {"tmpfs": [target]}, {"workspace": ("/s", target)}):
        with pytest.raises(SpecError, match=message):
            Spec(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"ro": ["/a:/x", "/b:/x"]},
        {"ro": ["/a:/x"], "rw": ["/b:/x"]},
        {"ro": ["/x"], "tmpfs": ["/x"]},
        {"tmpfs": ["/x", "/x/"]},
        {"workspace": "/a:/x", "ro": ["/b://x/."]},
        {"workspace": "/a", "tmpfs": "/work"},
    ],
)
def test_one_place_one_mount(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="the place of more than one mount"):
        Spec(**options)


def test_nested_places_are_fine() -> None:
    Spec(ro=["/a:/x", "/b:/x/y"], tmpfs="/x/z", workspace="/w:/x/y/w")


# ---- everything else ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": {"A=B": "1"}}, r"env: 'A=B' cannot name a variable"),
        ({"env": {"": "1"}}, "env: ''"),
        ({"env": {"A": "1\0"}}, "env: 'A'"),
        ({"env": {"A": 1}}, "env: 'A'=1: both must be text"),
        ({"env": ["A=1"]}, "env: wants a mapping"),
        ({"net": "bridge"}, "net: 'bridge' is not one of none, filtered, host"),
        ({"net": "host"}, "say allow_host_net as well"),
        ({"uid": -1}, "uid: "),
        ({"uid": 65534}, "uid: "),
        ({"uid": "root"}, "uid: "),
        ({"hostname": "a b"}, "hostname: "),
        ({"hostname": ""}, "hostname: "),
        ({"hostname": "x" * 64}, "hostname: "),
        ({"seccomp": "../x"}, "seccomp: "),
        ({"cwd": "rel"}, "cwd: the place inside must be absolute"),
        ({"cwd": ""}, "cwd: "),
        ({"root": ""}, "root: the path is empty"),
        ({"scratch": "a\0"}, "scratch: .*NUL"),
        ({"ro": [""]}, "ro: "),
        ({"ro": [7]}, "ro: wants a path"),
        ({"ro": 7}, "ro: wants a list"),
        ({"ro": ["a\0b"]}, "ro: .*NUL"),
        ({"require": ["walls"]}, "require: 'walls' is not a layer; the layers are user_ns"),
        ({"require": ["seccomp=none"]}, "require: "),
        ({"degrade": ["seccomp=kernel"]}, "degrade: "),
        ({"memory": -1}, "memory: must be more than 0"),
        ({"pids": 1.5}, "pids: wants a whole number"),
        ({"timeout": "soon"}, "timeout: 'soon' is not understood"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        Spec(**options)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, NsboxError)


def test_layers() -> None:
    every = [f"{layer}{strength}" for layer in LAYERS for strength in ("", "=kernel", "=watched")]
    assert Spec(require=every).require == tuple(every)
    assert Spec(degrade="landlock").degrade == ("landlock",)


def test_unknown_options_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match="unknown option 'memroy'; the options are"):
        Spec.from_dict({"memroy": 1})


def test_host_paths() -> None:
    assert Spec().host_paths() == ()
    spec = Spec(ro="/a:/b", rw="/c", workspace="/d", root="/e", scratch="/f")
    assert set(spec.host_paths()) == {"/a", "/c", "/d", "/e", "/f"}


# ---- written down -------------------------------------------------------------------------------------------------

letters = st.sampled_from(":\\") | st.characters(blacklist_characters="\0/", blacklist_categories=["Cs"])
names = st.text(letters, min_size=1, max_size=8)
places = names.filter(lambda name: name not in (".", "..")).map(lambda name: f"/{name}")
sources = st.one_of(places, names)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    targets = iter(draw(st.lists(places, unique=True, min_size=6, max_size=6)))
    options: dict[str, Any] = {
        "ro": [Bind(draw(sources), next(targets)) for _ in range(draw(st.integers(0, 2)))],
        "rw": [Bind(draw(sources), next(targets)) for _ in range(draw(st.integers(0, 1)))],
        "tmpfs": [
            Tmpfs(next(targets), draw(st.none() | st.integers(1, 2**40))) for _ in range(draw(st.integers(0, 1)))
        ],
        "workspace": draw(st.none() | st.just(Bind(draw(sources), next(targets)))),
        "env": draw(st.dictionaries(names.filter(lambda name: "=" not in name), names, max_size=3)),
        "memory": draw(st.integers(1, 2**50) | st.just("unlimited")),
        "timeout": draw(st.floats(0.001, 1e6) | st.just("unlimited")),
        "landlock": draw(st.booleans()),
        "cwd": draw(st.none() | places),
        "require": draw(st.lists(st.sampled_from(LAYERS), max_size=2)),
    }
    return Spec(**options)


@given(specs())
def test_survives_dict_json_and_toml(spec: Spec) -> None:
    assert Spec.from_dict(spec.to_dict()) == spec
    assert Spec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert Spec.from_dict(tomllib.loads(spec.to_toml())) == spec


def test_a_tmpfs_with_a_colon_survives() -> None:
    for spec in (
        Spec(tmpfs=Tmpfs("/a:b")),
        Spec(tmpfs=Tmpfs("/a\\", 7)),
        Spec(ro=Bind("a:b")),
        Spec(ro=Bind("a\\", "/c:d")),
    ):
        assert Spec.from_dict(spec.to_dict()) == spec


def test_bytes_that_are_no_utf8_survive_a_dict_but_not_toml() -> None:
    spec = Spec(ro=os.fsdecode(b"/a\xff"))
    assert Spec.from_dict(spec.to_dict()) == spec
    with pytest.raises(SpecError, match="not UTF-8"):
        spec.to_toml()


def test_the_dict_has_every_option_that_is_set() -> None:
    assert set(Spec(workspace="/w", cwd="/", export="/e", log="/l", cpuset="0", ionice="idle").to_dict()) == FIELDS
