"""Builds the C of nsbox: a static helper, and the cffi module that carries it.

The helper (zygote and init in one freestanding binary) and the shared object of join.c are linked first and then laid
as byte arrays into the source of the cffi module `nsbox._native_ffi`; seam.c of that module hands them out as sealed
memfds. Both C and Python read the declarations between the marks `cdef:begin` and `cdef:end` of the headers, so that
there is one text to keep right.

    setup.py                                             names `ffibuilder`
    python native/build_ffi.py --helper OUT [--cc CC]    builds the helper alone (linters, cross compilers)

Environment: CC names the compiler; NSBOX_SANITIZE=1 builds the seam with the sanitizers of addresses and of undefined
behaviour, and the helper so that the latter ends it (`./bootstrap sanitize`; docs/checks.md tells why not more);
NSBOX_WERROR=1 makes warnings errors (the linters do; a user's newer compiler shall not fail over a new warning).
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cffi import FFI

NATIVE = Path(__file__).resolve().parent
SEAM = ("seam.c", "floor.c")  #: of the module; every other C file but join.c is of the helper
# A shared object of its own, with what it needs of the helper; see its first lines.
JOIN = "join.c"
JOIN_SOURCES = (JOIN, "command.c", "privileges.c", "util.c")
CDEF_HEADERS = ("nsbox.h", "seam.h")
SANITIZE = os.environ.get("NSBOX_SANITIZE") == "1"

HELPER_CFLAGS = [
    *("-std=gnu11", "-O2", "-Wall", "-Wextra"),
    *("-ffreestanding", "-fno-pie", "-fno-asynchronous-unwind-tables", "-fno-unwind-tables"),
    "-ftrivial-auto-var-init=zero",
    # The compiler must not turn the loop inside our own memset into a call of memset.
    "-fno-tree-loop-distribute-patterns",
    *("-ffunction-sections", "-fdata-sections", "-fcf-protection=none", "-fmerge-all-constants"),
]
# Where native/arch.h keeps the guard of the stack, on x86-64 and on aarch64. Without a libc nobody else sets one up,
# and a variable for it would be a second segment.
STACK_GUARDS = (
    ["-mstack-protector-guard=tls"],
    [
        *("-mstack-protector-guard=sysreg", "-mstack-protector-guard-reg=tpidr_el0"),
        "-mstack-protector-guard-offset=40",
    ],
)
# exec maps each segment and faults each page: one read-and-execute segment is the cheapest binary there is.
HELPER_LDFLAGS = [
    *("-static", "-nostdlib", "-nostartfiles", "-s"),
    *("-Wl,-z,noexecstack", "-Wl,-z,norelro", "-Wl,-z,noseparate-code", "-Wl,--build-id=none", "-Wl,--gc-sections"),
]
# In a process with a C library the place where the helper keeps its guard may be a variable of somebody's.
JOIN_CFLAGS = ["-fPIC", "-fvisibility=hidden", "-fno-stack-protector"]
JOIN_LDFLAGS = [
    *("-shared", "-nostdlib", "-nostartfiles", "-s", "-Wl,-z,noexecstack", "-Wl,-z,relro,-z,now"),
    *("-Wl,--build-id=none", "-Wl,--gc-sections", "-Wl,-z,defs", "-Wl,-Bsymbolic"),
]
SEAM_CFLAGS = ["-std=gnu11", "-O2", "-fvisibility=hidden"]
HARDEN_CFLAGS = [
    *("-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-ftrivial-auto-var-init=zero"),
    # One module without the marks, and a Python that has a shadow stack goes without or does not load it.
    *("-fcf-protection", "-mbranch-protection=standard"),
]
HARDEN_LDFLAGS = ["-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack"]
# What not every compiler knows, or not for every processor.
OPTIONAL = ("-fcf-protection", "-fno-tree-loop", "-ftrivial-auto-var-init", "-mbranch-protection")
# Without a runtime undefined behaviour can only be answered by a trap. gcc 12 and clang both know this older name.
HELPER_SANITIZE = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
SANITIZE_FLAGS = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g"]

# pip asks for metadata in processes of their own; none of these commands compiles anything.
METADATA_COMMANDS = {"egg_info", "dist_info", "sdist"}
BUILD_COMMANDS = {"build", "build_ext", "bdist_wheel", "editable_wheel", "develop", "install"}


def compiler() -> list[str]:
    """The C compiler as an argument list: $CC, or the one Python was built with where it exists, or cc."""
    from shutil import which

    for words in (os.environ.get("CC"), sysconfig.get_config_var("CC")):
        argv = shlex.split(words or "")
        if argv and (words == os.environ.get("CC") or which(argv[0])):
            return argv
    return ["cc"]


def _compiles(cc: list[str], flags: list[str]) -> bool:
    """Whether the compiler knows all of the flags."""
    argv = [*cc, "-Werror", *flags, "-xc", "-c", "-o", os.devnull, "-"]
    probe = subprocess.run(argv, input=b"int nsb_probe(void) { return 0; }\n", capture_output=True)
    return probe.returncode == 0


def _accepted(cc: list[str], flags: list[str]) -> list[str]:
    """The flags without those that only some processors or compilers know."""
    return [flag for flag in flags if not flag.startswith(OPTIONAL) or _compiles(cc, [flag])]


def _stack_guard(cc: list[str]) -> list[str]:
    """The flags of a stack protector that looks where native/arch.h keeps the guard; without such, of none."""
    known = (["-fstack-protector-strong", *guard] for guard in STACK_GUARDS)
    return next((flags for flags in known if _compiles(cc, flags)), ["-fno-stack-protector"])


def helper_cflags(cc: list[str]) -> list[str]:
    """What the helper is compiled with by this compiler."""
    return _accepted(cc, HELPER_CFLAGS) + _stack_guard(cc) + (HELPER_SANITIZE if SANITIZE else [])


def build_helper(out: Path, cc: list[str] | None = None, werror: bool = False) -> None:
    """Compile and link every C file but the module's own and join.c into the static helper `out`. Raises SystemExit."""
    sources = [path.name for path in NATIVE.glob("*.c") if path.name not in (*SEAM, JOIN)]
    _link("the helper", sources, [], HELPER_LDFLAGS, out, cc, werror)


def build_join(out: Path, cc: list[str] | None = None, werror: bool = False) -> None:
    """Compile and link the shared object `out` that a template interpreter loads. Raises SystemExit."""
    _link("the shared object", list(JOIN_SOURCES), JOIN_CFLAGS, JOIN_LDFLAGS, out, cc, werror)


def _link(
    what: str, names: list[str], more: list[str], ldflags: list[str], out: Path, cc: list[str] | None, werror: bool
) -> None:
    """Raises SystemExit with the compiler's own words if it fails: setuptools would show a traceback instead."""
    cc = cc or compiler()
    sources = sorted(str(NATIVE / name) for name in names)
    try:
        cflags = helper_cflags(cc) + more + (["-Werror"] if werror else [])
        argv = [*cc, *cflags, f"-I{NATIVE}", "-o", str(out), *sources, *ldflags, "-lgcc"]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f"nsbox: cannot run the C compiler {cc[0]!r}: {error.strerror}; install gcc") from None
    if done.returncode:
        raise SystemExit(f"nsbox: {what} did not compile\n{shlex.join(argv)}\n{done.stderr}")
    sys.stderr.write(done.stderr)


def binary_as_c(name: str, binary: bytes) -> str:
    """A binary as C source text: the array of that name, and its length with _size behind the name."""
    rows = (",".join(map(str, binary[start : start + 32])) for start in range(0, len(binary), 32))
    return (
        f"extern const unsigned char {name}[];\nextern const unsigned long {name}_size;\n"
        f"const unsigned long {name}_size = {len(binary)};\n"
        f"const unsigned char {name}[] = {{\n" + ",\n".join(rows) + "\n};\n"
    )


def cdef_text() -> str:
    """What the headers of CDEF_HEADERS declare between their marks, in order. Raises SystemExit for a missing mark."""
    parts = []
    for name in CDEF_HEADERS:
        found = re.findall(r"/\* cdef:begin \*/(.*?)/\* cdef:end \*/", (NATIVE / name).read_text(), re.DOTALL)
        if not found:
            raise SystemExit(f"nsbox: native/{name} has no text between /* cdef:begin */ and /* cdef:end */")
        parts += found
    return "\n".join(parts)


def make_builder() -> "FFI":
    """The cffi builder that setup.py names."""
    from cffi import FFI

    words = set(sys.argv[1:])
    if words & METADATA_COMMANDS and not words & BUILD_COMMANDS:
        helper = "#error the helper is not built for commands that only collect metadata\n"
    else:
        with tempfile.TemporaryDirectory(prefix="nsbox-build-") as directory:
            helper = ""
            for name, build in (("nsb_helper", build_helper), ("nsb_join", build_join)):
                build(Path(directory) / name, werror=os.environ.get("NSBOX_WERROR") == "1")
                helper += binary_as_c(name, (Path(directory) / name).read_bytes())
    builder = FFI()
    builder.cdef(cdef_text())
    builder.set_source(
        "nsbox._native_ffi",
        "".join(f'#include "{name}"\n' for name in CDEF_HEADERS) + helper,
        # setuptools wants paths that are relative to setup.py, which is also where it runs.
        sources=[f"native/{name}" for name in SEAM],
        depends=sorted(f"native/{path.name}" for path in NATIVE.glob("*.[ch]")),
        include_dirs=["native"],
        extra_compile_args=SEAM_CFLAGS + (SANITIZE_FLAGS if SANITIZE else _accepted(compiler(), HARDEN_CFLAGS)),
        extra_link_args=HARDEN_LDFLAGS + (SANITIZE_FLAGS if SANITIZE else []),
    )
    return builder


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the static helper alone, with warnings as errors.")
    parser.add_argument("--helper", required=True, type=Path, metavar="OUT", help="where to write the binary")
    parser.add_argument("--cc", type=shlex.split, help="the compiler, e.g. aarch64-linux-gnu-gcc (default: $CC or cc)")
    args = parser.parse_args()
    build_helper(args.helper, args.cc, werror=True)
    with tempfile.TemporaryDirectory(prefix="nsbox-build-") as directory:
        build_join(Path(directory) / "join.so", args.cc, werror=True)
    print(f"{args.helper}: {args.helper.stat().st_size} bytes")


if __name__ == "__main__":
    main()
elif __name__ == "__cffi__":
    ffibuilder = make_builder()
