#!/bin/sh
# suite.sh PYTHON smoke|full: what runs in the guest, as root, for each kind of caller. Called by test_vm.py.
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
export PYTHONDONTWRITEBYTECODE=1 NSBOX_TEST_AS

mkdir -p "$work/home" "$work/run" "$work/tmp" "$work/root"
chmod 700 "$work/home" "$work/run"
chown "$uid:$uid" "$work/home" "$work/run" "$work/tmp"

as_user() {
    setpriv --reuid "$uid" --regid "$uid" --clear-groups --inh-caps=-all env HOME="$work/home" TMPDIR="$work/tmp" \
        XDG_RUNTIME_DIR="$work/run" XDG_CACHE_HOME="$work/home/.cache" USER=user LOGNAME=user NSBOX_TEST_AS=user \
        HYPOTHESIS_STORAGE_DIRECTORY="$work/home/.hypothesis" "$@"
}
as_root() { env TMPDIR="$work/root" HYPOTHESIS_STORAGE_DIRECTORY="$work/root/.hypothesis" NSBOX_TEST_AS=root "$@"; }

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
    export NSBOX_VM_CGROUP
    printf '\n=== %s, %s\n' "$(uname -r)" "$name"
    log=$work/tmp/$name
    mkdir -p "$results/$name"
    $caller "$python" "$checkout/tests/vm/inside/facts.py" >"$results/$name/facts.json"
    (cd "$checkout" && $caller "$python" -m pytest -q -rs -p no:cacheprovider --junitxml="$log.xml" "$@")
    [ ! -e "$log.xml" ] || cp "$log.xml" "$results/$name/junit.xml"
    find "$cgroups" -depth -type d -path '*/nsbox/*' >"$results/$name/left.txt"
}

# Runs CALLER's command in a group of its own that was given to it, wherever controllers are.
delegated() {
    if [ -e "$cgroups/cgroup.procs" ]; then
        set -- "$cgroups/user-$uid/shell" "$@"
    else
        for hierarchy in "$cgroups"/*/; do
            mkdir -p "${hierarchy}user-$uid"
            chown -R "$uid" "${hierarchy}user-$uid"
        done
        set -- "" "$@"
    fi
    group=$1
    shift
    if [ -n "$group" ]; then
        mkdir -p "$group"
        chown -R "$uid" "$cgroups/user-$uid"
    fi
    (
        for procs in ${group:+"$group"/cgroup.procs} "$cgroups"/*/"user-$uid"/cgroup.procs; do
            # 0 is the process that writes: this subshell.
            [ ! -e "$procs" ] || echo 0 >"$procs"
        done
        as_user "$@"
    )
}

inside=tests/vm/inside/test_sandbox.py
all="$inside tests/host/test_cgroup_limits.py"
[ "$extent" = smoke ] || all="tests/vm/inside/test_sandbox.py tests/host tests/native tests/escape"

cd "$checkout" || exit
# shellcheck disable=SC2086  # a list of words
run root as_root own $all
if reachable; then
    # shellcheck disable=SC2086
    run user-delegated delegated given $all
    run user as_user none "$inside"
fi
[ "$NSBOX_IN_VM" = v2 ] || exit 0
echo 0 >/proc/sys/user/max_user_namespaces
run root-without-userns as_root off tests/vm/inside/test_refused.py
run user-without-userns as_user off tests/vm/inside/test_refused.py
