#!/bin/sh
# Every benchmark, one after the other, for the results of this kind of machine: about five minutes as root, less as an
# ordinary user. Leave the machine alone meanwhile.
#
#     benchmarks/all.sh [--quick] [--results DIR]      PYTHON=... names the interpreter that has nsbox
set -eu
here=$(cd -- "$(dirname -- "$0")" && pwd -P)
[ $# -gt 0 ] || set -- --results "$here/results"
run() {
    name=$1
    shift
    printf '\n=== %s\n' "$name"
    "${PYTHON:-python3}" "$here/$name.py" "$@"
}
for name in layers start runtime throughput memory program pools network neighbours; do
    run "$name" "$@"
done
# The same from a caller with 2 GiB in use.
run start "$@" --touch-mib 2048 --runs 60
