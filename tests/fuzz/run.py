#!/usr/bin/env python3
"""Builds and runs the fuzzers of the C: python tests/fuzz/run.py [--seconds N] [--target T]. See README.md here."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[1] / "native"
OTHERS = ("seam.c", "floor.c", "join.c")  #: every other C file is of the helper
TARGETS = ("launch", "control", "receive")
FLAGS = [
    *("-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror"),
    *("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"),
]


def missing() -> str:
    """Why the fuzzers cannot be built here; the empty string: they can."""
    if not shutil.which("clang"):
        return "clang is missing: install clang"
    with tempfile.TemporaryDirectory(prefix="nsbox-build-") as directory:
        argv = ["clang", "-fsanitize=fuzzer,address", "-xc", "-", "-o", f"{directory}/probe"]
        text = "int LLVMFuzzerTestOneInput(const void *data, unsigned long size) { return 0; }\n"
        done = subprocess.run(argv, input=text, text=True, capture_output=True)
    return "" if done.returncode == 0 else "clang has no libFuzzer here: install libclang-rt-dev"


def build(target: str, directory: Path) -> Path:
    """Compile a target. Raises CalledProcessError."""
    out = directory / target
    clang = ["clang", *FLAGS, f"-I{NATIVE}", f"-I{HERE}"]
    if target == "receive":
        subprocess.run([*clang, HERE / "receive.c", NATIVE / "seam.c", "-lpthread", "-o", out], check=True)
        return out
    objects = []
    for source in [HERE / f"{target}.c", *(path for path in NATIVE.glob("*.c") if path.name not in OTHERS)]:
        objects.append(directory / f"{source.parent.name}-{source.stem}.o")
        subprocess.run([*clang, "-include", HERE / "kernel.h", "-c", source, "-o", objects[-1]], check=True)
    subprocess.run([*clang, HERE / "kernel.c", *objects, "-o", out], check=True)
    return out


def fuzz(target: str, seconds: int, found: Path, corpus: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Build a target and run it. What it chokes on is written to ``found``; what it learns is added to ``corpus``."""
    with tempfile.TemporaryDirectory(prefix="nsbox-build-") as name:
        directory = Path(name)
        program = build(target, directory)
        seeds = directory / "seeds"
        seeds.mkdir()
        # In a process of its own: the fuzzers are built without the library, their first inputs with it.
        subprocess.run([sys.executable, HERE / "seeds.py", target, seeds], check=True, stdout=subprocess.DEVNULL)
        learnt = corpus or directory / "learnt"
        learnt.mkdir(parents=True, exist_ok=True)
        argv = [program, f"-max_total_time={seconds}", "-max_len=16384", "-timeout=10", "-print_final_stats=1"]
        argv += ["-verbosity=1", "-use_value_profile=1", f"-artifact_prefix={found}/{target}-", learnt, seeds]
        env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=0"}
        return subprocess.run(argv, env=env, cwd=directory, stderr=subprocess.PIPE, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Fuzz the C of nsbox under the address and undefined behaviour sanitizers."
    )
    parser.add_argument("--seconds", type=int, default=60, help="how long each target runs (default: 60)")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--corpus", type=Path, help="a directory to keep what was learnt in, for the next run")
    args = parser.parse_args()
    if why := missing():
        print(f"run.py: {why}", file=sys.stderr)
        return 2
    failed = 0
    for target in args.target or TARGETS:
        done = fuzz(target, args.seconds, Path.cwd(), args.corpus and args.corpus / target)
        last = [line for line in done.stderr.splitlines() if " cov: " in line][-1:]
        print(f"{target}: {'FAILED' if done.returncode else 'ok'} {' '.join(last)}", flush=True)
        if done.returncode:
            failed = 1
            sys.stderr.write(done.stderr[-8000:])
    return failed


if __name__ == "__main__":
    sys.exit(main())
