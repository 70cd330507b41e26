#!/bin/sh
# suite.sh PYTHON brief|usual|FOLDER: what runs in the guest, as root, for each kind of caller. Called by test_vm.py.
#
# Each pass leaves a folder in /run/vm/results: facts.json, junit.xml, left.txt (control groups that stayed).
set -u

python=$1
extent=$2
checkout=$(cd -- "$(dirname -- "$0")/../.." && pwd -P)
results=/run/vm/results
uid=61234
cgroups=/sys/fs/cgroup
work=/tmp/nsbox-vm
# On a disk: a tmpfs cannot be idmapped before Linux 6.3, and tests mount what they made, read-write.
temporary=/mnt/disk/nsbox-vm
[ -d /mnt/disk ] || temporary=$work

mkdir -p "$work/home" "$work/run" "$temporary/user" "$temporary/root"
chmod 700 "$work/home" "$work/run"
chown "$uid:$uid" "$work/home" "$work/run" "$temporary/user"

as_user() {
    setpriv --reuid "$uid" --regid "$uid" --clear-groups --inh-caps=-all env HOME="$work/home" TMPDIR="$temporary/user" \
        XDG_RUNTIME_DIR="$work/run" XDG_CACHE_HOME="$work/home/.cache" USER=user LOGNAME=user NSBOX_TEST_AS=user \
        HYPOTHESIS_STORAGE_DIRECTORY="$work/home/.hypothesis" "$@"
}
as_root() { env TMPDIR="$temporary/root" HYPOTHESIS_STORAGE_DIRECTORY="$temporary/root/.hypothesis" NSBOX_TEST_AS=root "$@"; }

# The ordinary user must reach the checkout and the interpreter, which may lie below a home directory of mode 0700. This
# machine is thrown away: its directories are simply opened.
reachable() {
    as_user "$python" -c 'import nsbox, pytest' 2>/dev/null && return
    for path in "$checkout" "$("$python" -c 'import sys; print(sys.prefix, sys.base_prefix, sep="\n")')"; do
        printf '%s\n' "$path"
    done | while read -r path; do
        while [ "$path" != / ]; do
            chmod go+rx "$path"
            path=$(dirname "$path")
        done
    done
    for name in nsbox native profiles tests; do chmod -R go+rX "$checkout/$name"; done
    as_user "$python" -c 'import nsbox, pytest'
}

# run NAME CALLER CGROUP TESTS...: one pass. CGROUP: own (root's), given (delegated), none; off: no user namespaces.
run() {
    name=$1
    caller=$2
    NSBOX_VM_CGROUP=$3
    shift 3
    printf '\n=== %s, %s\n' "$(uname -r)" "$name"
    folder=$temporary/user/$name
    NSBOX_VM_FACTS=$folder/facts.json
    export NSBOX_VM_CGROUP NSBOX_VM_FACTS
    mkdir -p "$folder"
    chown "$uid:$uid" "$folder"
    # The plugin of hypothesis takes seconds to load here; its tests run without it.
    $caller "$python" -m pytest -q -rs --durations=6 -p no:cacheprovider -p no:hypothesispytest \
        --junitxml="$folder/junit.xml" "$@"
    cp -R "$folder" "$results/"
    find "$cgroups" -depth -type d -path '*/nsbox/*' >"$results/$name/left.txt"
}

# given HIERARCHY: makes a group there that belongs to the user, and prints the file that moves a process into it. On v2
# the controllers are shared out, and the process goes into a group below: one with processes in it cannot share.
given() {
    group=${1%/}/user-$uid
    if [ -e "${1%/}/cgroup.controllers" ]; then
        sed 's/[^ ]*/+&/g' "${1%/}/cgroup.controllers" >"${1%/}/cgroup.subtree_control"
        mkdir -p "$group/shell"
        echo "$group/shell/cgroup.procs"
    else
        mkdir -p "$group"
        echo "$group/cgroup.procs"
    fi
    chown -R "$uid" "$group"
}

# As as_user, in groups that were given to the user in every hierarchy.
delegated() (
    while read -r _ hierarchy type _; do
        case $type in cgroup | cgroup2) echo 0 >"$(given "$hierarchy")" ;; esac # 0: this subshell
    done </proc/mounts
    as_user "$@"
)

cd "$checkout" || exit
sandbox=tests/vm/inside/test_sandbox.py
tests=$sandbox
[ "$NSBOX_IN_VM" != v2 ] || tests="$sandbox tests/host/test_cgroup_limits.py"

if [ "$extent" = brief ]; then
    # What differs most between kernels: which limits hold by what, and which file systems take which mounts.
    names='strengths or identity or test_memory or test_processes or test_disk or read_write or test_workspace or listens'
    names="($names) and not come_and_go"
    run root as_root own "$sandbox" -k "$names"
    if reachable; then run user as_user none "$sandbox" -k "$names"; fi
    echo 0 >/proc/sys/user/max_user_namespaces
    run user-without-userns as_user off tests/vm/inside/test_refused.py
    exit
fi

if [ "$extent" != usual ]; then
    # Attacks are in three folders. The plugin is what says in the other passes what is enforced.
    case $extent in
    escape) set -- -m attack tests/escape tests/host tests/unit ;;
    *) set -- -m 'not attack' "tests/$extent" ;;
    esac
    set -- -p tests.vm.inside.conftest "$@"
    run root as_root own "$@"
    if reachable; then run user-delegated delegated given "$@"; fi
    exit
fi

# shellcheck disable=SC2086  # a list of words
run root as_root own $tests
if reachable; then
    # shellcheck disable=SC2086
    run user-delegated delegated given $tests
    run user as_user none "$sandbox"
fi
if [ "$NSBOX_IN_VM" = v2 ]; then
    echo 0 >/proc/sys/user/max_user_namespaces
    run root-without-userns as_root off tests/vm/inside/test_refused.py
    run user-without-userns as_user off tests/vm/inside/test_refused.py
fi
