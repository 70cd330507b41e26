"""Rules about the project's own files."""

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nsbox"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module imports only from groups to its left, or from its own group. "" is nsbox/__init__.py, the names for users.
ORDER = (
    "errors light | frozen | units toml | binds | secrets | spec profiles | places trust masking | guard | change | "
    "_native | probe | plan | encode | resources | doctor | janitor watch pausing | own_limits received prepared | "
    "tree | layers | failures | groups handle | copyin | launch | enforce streams | supervise ports | "
    "contents copying budget | snapshot snapshot_tar "
    "| diff changes outgoing | transfer boundary telemetry record alarm stock | inputs | report | crossing | "
    "ahead boxchanges | python_env python_template python_inside template | interpreter | templates | "
    "pool python_pool | executor | metrics metrics_text metrics_html coverage logview gc | api | rooted | "
    "files find archive | boxwatch process commands shell | box | aio aio_pool aio_wait |  | "
    "bench selftest | cli_options cli_output cli_words | "
    "cli_review cli_log cli_stats cli_bench cli_selftest cli_completion | cli_shell cli_run | cli_python | cli | "
    "__main__ | integrations"
)
RANK = {name: rank for rank, group in enumerate(ORDER.split("|")) for name in group.split() or [""]}
# These decide and describe; they leave the doing to others.
PURE = {"errors", "light", "frozen", "units", "spec", "profiles", "plan"}
# nsbox._profiles holds data; nsbox._native_ffi is the compiled module.
DATA_PACKAGES = {"_profiles"}
COMPILED = "_native_ffi"
MAX_LINES = 400
SKIPPED = {
    ".git",
    ".venv",
    ".venv-user",
    "nsbox.egg-info",
    "build",
    "dist",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
}


def identifier(path: Path) -> str:
    return str(path.relative_to(ROOT))


def group_of(path: Path) -> str:
    """The name in ORDER that a file of the package belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def is_module(dotted: str) -> bool:
    path = ROOT / dotted.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists() or dotted.endswith(COMPILED)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import of our own package in a file, wherever in the file it stands."""
    here = [*path.relative_to(ROOT).with_suffix("").parts][:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "nsbox")
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module.split(".")[0] == "nsbox":
                for alias in node.names:
                    full = f"{module}.{alias.name}"
                    yield node.lineno, full if is_module(full) else module


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_imports_point_left(path: Path) -> None:
    group = group_of(path)
    assert group in RANK, f"give {group!r} its place in ORDER"
    for line, name in imported(path):
        target = [*name.split("."), ""][1]
        where = f"{identifier(path)}:{line} imports {name}"
        if target == COMPILED:
            assert group == "_native", f"{where}: only nsbox._native may"
        elif target not in DATA_PACKAGES:
            assert target in RANK, f"{where}: give {target!r} its place in ORDER"
            assert target == group or RANK[target] <= RANK[group], f"{where}, which stands to its right"
            assert target != "_native" or group not in PURE, f"{where}, which does things"


@pytest.mark.parametrize("path", MODULES, ids=identifier)
def test_module_fits_in_a_head(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: split it"


def project_files() -> Iterator[Path]:
    for directory, names, files in os.walk(ROOT):
        names[:] = [name for name in names if name not in SKIPPED]
        yield from (Path(directory, name) for name in files if not name.endswith((".so", ".pyc", ".png")))


def test_no_machine_of_ours_in_the_text() -> None:
    # Written so that this file does not match itself.
    forbidden = re.compile(r"/work/(?:main|shared)\b|shared/(?:design)|/tmp/(?:brief|venv)\b|/root/\.(?:pyenv)")
    found = []
    for path in project_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if forbidden.search(line):
                found.append(f"{identifier(path)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("name", ["bootstrap", ".ci/run"])
def test_scripts_are_executable(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)


def test_every_package_is_shipped() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in MODULES}
    expected = {".".join(folder.relative_to(ROOT).parts) for folder in folders} | {"nsbox._profiles"}
    assert set(setuptools["packages"]) == expected
    assert all((folder / "__init__.py").exists() for folder in folders)
    assert setuptools["package-dir"]["nsbox._profiles"] == "profiles"
    assert setuptools["package-data"]["nsbox._profiles"] == ["*.toml"]
    assert (PACKAGE / "py.typed").exists()


def test_profiles_are_toml() -> None:
    paths = list((ROOT / "profiles").iterdir())
    assert paths
    for path in paths:
        assert path.suffix == ".toml", f"{path.name} would not be shipped"
        tomllib.loads(path.read_text())
