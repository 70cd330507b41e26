#!/bin/sh
# Every benchmark, one after the other, for the results of this kind of machine: about five minutes as root, less as an
# ordinary user. Leave the machine alone meanwhile.
#
#     benchmarks/all.sh [--quick] [--results DIR]     PYTHON=... names the interpreter that has nsbox
set -eu
here=$(cd -- "$(dirname -- "$0")" && pwd -P)
case " $* " in *" --results "*) ;; *) set -- "$@" --results "$here/results" ;; esac
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
# Every table in one page, beside the files that it is made from.
while [ $# -gt 1 ] && [ "$1" != --results ]; do shift; done
"${PYTHON:-python3}" "$here/tables.py" "${2:-$here/results}"
