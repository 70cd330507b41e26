"""How the compiled parts were built, read from the files that run: see docs/checks.md."""

import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nsbox import _native

NATIVE = Path(__file__).resolve().parents[2] / "native"
X86_64 = platform.machine() == "x86_64"


def readelf(path: Path, *words: str) -> str:
    if not shutil.which("readelf"):
        pytest.skip("readelf is missing: install binutils")
    env = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(["readelf", "-W", *words, path], env=env, capture_output=True, text=True, check=True).stdout


def segments(path: Path) -> list[list[str]]:
    """Type and flags of each program header."""
    rows = re.findall(r"^  (\w+) +0x\w+ 0x\w+ 0x\w+ 0x\w+ 0x\w+ ([RWE ]{3})", readelf(path, "-l"), re.MULTILINE)
    return [[kind, flags.replace(" ", "")] for kind, flags in rows]


# The module, which lives in the embedding process


@pytest.fixture
def module() -> Path:
    path = Path(_native._native_ffi.__file__)
    if "__asan" in readelf(path, "--dyn-syms"):
        pytest.skip("this build is for the sanitizers, which have checks of their own")
    return path


OVERFLOW = """
import os
from nsbox._native import ffi, lib
buffer = bytearray(64)
lib.nsb_write(os.open("/dev/null", os.O_WRONLY), ffi.from_buffer(buffer), LENGTH)
"""


@pytest.mark.parametrize("length, fine", [(64, True), (4096, False)], ids=["within", "beyond"])
def test_a_build_for_the_sanitizers_sees_an_overflow(length: int, fine: bool) -> None:
    if "__asan" not in readelf(Path(_native._native_ffi.__file__), "--dyn-syms"):
        pytest.skip("an ordinary build: `./bootstrap sanitize` makes and tests the other kind")
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libasan" in line}
    argv, env = (
        [sys.executable, "-c", OVERFLOW.replace("LENGTH", str(length))],
        {**os.environ, "LD_PRELOAD": loaded.pop()},
    )
    done = subprocess.run(argv, env=env, stderr=subprocess.PIPE)
    assert (done.returncode == 0) is fine
    assert (b"heap-buffer-overflow" in done.stderr) is not fine


def names(path: Path, *, defined: bool) -> set[str]:
    """Names of the dynamic symbols that the file gives, or wants."""
    rows = (row.split() for row in readelf(path, "--dyn-syms").splitlines())
    wanted = (row for row in rows if len(row) >= 8 and row[4] in ("GLOBAL", "WEAK") and (row[6] == "UND") != defined)
    return {row[7].partition("@")[0] for row in wanted}


def test_nothing_of_the_module_can_be_rebound(module: Path) -> None:
    assert "GNU_RELRO" in [kind for kind, _ in segments(module)]
    dynamic = readelf(module, "-d")
    assert re.search(r"\(FLAGS_1\).*\bNOW\b", dynamic), "the linker binds all of it before it is made read-only"
    assert "TEXTREL" not in dynamic


def test_nothing_of_the_module_is_writable_and_executable(module: Path) -> None:
    found = segments(module)
    assert ["GNU_STACK", "RW"] in found
    assert not [flags for _, flags in found if "W" in flags and "E" in flags]


def test_the_module_shows_python_s_entry_alone(module: Path) -> None:
    assert names(module, defined=True) - {"_init", "_fini"} == {"PyInit__native_ffi"}


def test_the_module_checks_its_stack_and_its_buffers(module: Path) -> None:
    wanted = names(module, defined=False)
    assert "__stack_chk_fail" in wanted
    assert {name for name in wanted if name.endswith("_chk")}, "functions of _FORTIFY_SOURCE"


@pytest.mark.skipif(not X86_64, reason="control-flow marks of x86-64")
def test_the_module_marks_where_it_may_be_called(module: Path) -> None:
    """Whether the file as a whole says so, depends on the C library's start files, too."""
    assert module.read_bytes().count(b"\xf3\x0f\x1e\xfa") > 10, "endbr64"


# The helper, which is every init


@pytest.fixture
def helper(tmp_path: Path) -> Path:
    """A copy of the binary that runs."""
    copy = tmp_path / "helper"
    copy.write_bytes(Path(f"/proc/{_native.zygote().pid}/exe").read_bytes())
    return copy


def test_the_helper_is_one_segment_that_nobody_can_write(helper: Path) -> None:
    assert segments(helper) == [["LOAD", "RE"], ["GNU_STACK", "RW"]]
    writable = re.findall(r"^ +\[ *\d+\] (\S+) .* W?A?W\w* ", readelf(helper, "-S"), re.MULTILINE)
    assert writable == []


@pytest.mark.skipif(not X86_64, reason="looks for an instruction of x86-64")
def test_the_helper_checks_its_stack(helper: Path) -> None:
    """mov %fs:0x28, REGISTER in every function with a buffer."""
    assert len(re.findall(rb"\x64[\x48\x4c]\x8b.\x25\x28\x00\x00\x00", helper.read_bytes(), re.DOTALL)) > 10


# The guard of the helper's stack at work

PROGRAM = """
#include "helper.h"
static NOINLINE void fill(volatile char *to, int n) { for (int i = 0; i < n; i++) to[i] = 65; }
static NOINLINE void victim(int n) { char buffer[16]; fill(buffer, n); }
NORETURN void nsb_main(unsigned long *area);
__attribute__((used)) NORETURN void nsb_main(unsigned long *area)
{
    nsb_set_area(area);
    renew_guard();
    unsigned long first = area[GUARD_WORD];
    renew_guard();
    if (first == area[GUARD_WORD] || first == 0)
        nsb_exit(1);
    victim(LENGTH);
    nsb_exit(7);
}
NSB_ENTRY;
"""


@pytest.fixture
def build() -> ModuleType:
    """native/build_ffi.py, where there is a checkout and a compiler."""
    if not (NATIVE / "build_ffi.py").exists():
        pytest.skip("the sources are not here")
    spec = importlib.util.spec_from_file_location("build_ffi", NATIVE / "build_ffi.py")
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    if not shutil.which(found.compiler()[0]):
        pytest.skip("no C compiler: install gcc")
    return found


@pytest.mark.parametrize("length, status", [(16, 7), (64, -signal.SIGILL)], ids=["within", "beyond"])
def test_an_overflow_of_a_buffer_ends_the_helper(tmp_path: Path, build: ModuleType, length: int, status: int) -> None:
    cc = build.compiler()
    flags = [flag for flag in build.helper_cflags(cc) if "sanitize" not in flag]
    if "-fno-stack-protector" in flags:
        pytest.skip("this compiler knows no stack guard in the place that native/arch.h has for it")
    source, out = tmp_path / "smash.c", tmp_path / "smash"
    source.write_text(PROGRAM.replace("LENGTH", str(length)))
    argv = [*cc, *flags, f"-I{NATIVE}", "-o", out, source, NATIVE / "util.c", *build.HELPER_LDFLAGS, "-lgcc"]
    subprocess.run(argv, check=True)
    assert subprocess.run([out], env={}).returncode == status
