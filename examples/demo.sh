#!/bin/sh
# Real programs in throw-away sandboxes, and what they see. Each step shows a command, then what it says.
# Needs nsbox in PATH, or NSBOX set to the command. Programs that are absent are left out. Nothing stays behind.
set -u

nsbox=${NSBOX:-nsbox}
command -v "${nsbox%% *}" >/dev/null 2>&1 || {
    echo "demo: $nsbox is not in PATH; run ./bootstrap demo" >&2
    exit 1
}
scratch=$(mktemp -d "${TMPDIR:-/tmp}/nsbox-demo.XXXXXX") || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
cd "$scratch" || exit 1

bold='' dim='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR-}" ] && [ "${TERM-dumb}" != dumb ]; then
    bold=$(printf '\033[1m') dim=$(printf '\033[2m') plain=$(printf '\033[0m')
fi
number=0
failed=0
once=''

# step TITLE [PROGRAM...]: the heading. Fails when a program is absent on this host.
step() {
    number=$((number + 1))
    printf '\n%s%d. %s%s\n' "$bold" "$number" "$1" "$plain"
    shift
    for program; do
        command -v "$program" >/dev/null 2>&1 || {
            printf '   (left out: %s is not installed here)\n' "$program"
            return 1
        }
    done
}

# show WORDS...: the command as one would type it.
show() {
    printf '%s$ nsbox' "$dim"
    for word; do
        case $word in
        '' | *[!A-Za-z0-9_./:=,@%+-]*) printf " '%s'" "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")" ;;
        *) printf ' %s' "$word" ;;
        esac
    done
    printf '%s\n' "$plain"
}

# box STATUS WORDS...: shows the command, runs it, and complains when the exit status is another one ("any": may be any).
box() {
    expected=$1
    shift
    show "$@"
    # shellcheck disable=SC2086  # NSBOX may be several words
    $nsbox "$@" >"$scratch/.out" 2>&1
    status=$?
    # Where limits are watched instead of held by the kernel, nsbox says so each time; once is enough here.
    sed -e "$once" -e 's/^/  /' "$scratch/.out"
    grep -q '^nsbox: watched' "$scratch/.out" && once='/^nsbox: watched/d'
    [ "$status" = 0 ] || printf '  %s-> exit status %s%s\n' "$dim" "$status" "$plain"
    if [ "$expected" != any ] && [ "$status" != "$expected" ]; then
        printf '  !! expected %s\n' "$expected"
        failed=1
    fi
}

# host WORDS...: the same for a command on the host, for comparison.
host() {
    printf '%shost$ %s%s\n' "$dim" "$*" "$plain"
    "$@" 2>&1 | sed 's/^/  /'
}

printf '%s\n' "nsbox runs a command in a fresh sandbox that is gone afterwards. This is kernel $(uname -r), uid $(id -u)."

step "What is visible: a root of its own, one user, three processes"
box 0 run -- sh -c 'ls -m /; id; ps -e'

step "What is not: the caller's files and environment"
echo 'token=12345' >credentials
DEMO_TOKEN=12345
export DEMO_TOKEN
host cat "$scratch/credentials"
box 1 run -- cat "$scratch/credentials"
# shellcheck disable=SC2016  # for the shell inside
box 0 run -- sh -c 'echo "home: $(ls -A ~ | wc -l) files; DEMO_TOKEN=${DEMO_TOKEN:-not set}; $(env | wc -l) variables"'

if step "No network: there is only loopback" ip; then
    box 0 run -- ip -brief addr
    box any run -- ip route get 192.0.2.1
fi

mkdir src
cat >src/hello.c <<'EOC'
#include <stdio.h>
#include <unistd.h>
int main(void) { printf("compiled and run as uid %u, pid %d\n", getuid(), getpid()); return 42; }
EOC
if step "A compiler, in a copy-on-write view of a folder: the result is gone, the folder as it was" gcc; then
    box 42 run --workspace src -- sh -c 'gcc -O2 -Wall -o hello hello.c && ls -l && ./hello'
    host ls src
fi

if step "git clones a repository" git; then
    git init -q repository
    echo '# A project' >repository/README.md
    git -C repository add .
    git -C repository -c user.name=demo -c user.email=demo@example.org commit -q -m 'First commit'
    box 0 run --workspace repository -- sh -c 'git clone . /tmp/copy && cd /tmp/copy && git log --oneline --stat'
fi

step "Python with this interpreter's packages, on data that it may only read"
printf 'day,price\n1,10.5\n2,12.0\n3,7.5\n' >prices.csv
cat >analyse.py <<'EOC'
import csv
import sys

with open(sys.argv[1], newline="") as file:
    prices = [float(row["price"]) for row in csv.DictReader(file)]
print(f"Python {sys.version.split()[0]}: mean of {len(prices)} prices is {sum(prices) / len(prices)}")
open(sys.argv[1], "a")
EOC
box 1 python --ro prices.csv:/data/prices.csv analyse.py /data/prices.csv

step "What never ends is ended, and what it said is kept"
box 124 run --timeout 1s -- sh -c 'echo working; while :; do :; done'

step "What fills the disk fills its own"
box 1 run --disk 16M -- dd if=/dev/zero of=big bs=1M

step "What multiplies reaches a limit (this one stops by itself at 300)"
cat >fork.py <<'EOC'
import os
import time

made = 0
try:
    while made < 300:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        made += 1
    print(f"made {made} processes")
except OSError as error:
    print(f"made {made} processes, then: {error.strerror}")
EOC
box any python --pids 64 fork.py

step "What wants memory reaches a limit (this one stops by itself at 192 MiB)"
box any python --memory 64M -c 'kept = [bytearray(1 << 20) for _ in range(192)]; print(f"got {len(kept)} MiB")'

step "Exit statuses tell the command's own from nsbox's"
box 7 run -- sh -c 'exit 7'
# shellcheck disable=SC2016
box 143 run -- sh -c 'kill -TERM $$'
box 127 run -- no-such-program
box 126 run -- /etc/passwd
box 125 run --ro /no/such/data -- true

step "The report says what was enforced, how strongly, and by what"
show run --json -- true
# shellcheck disable=SC2086  # NSBOX may be several words
$nsbox run --json -- true >report.json 2>&1 || failed=1
cat >table.awk <<'EOC'
# One line for each {"layer": {"strength": ..., "how": ...}} of the report.
{
    sub(/.*"enforced": \{/, "")
    sub(/\}\}.*/, "}")
    while (match($0, /"[a-z_]+": \{[^}]*\}/)) {
        entry = substr($0, RSTART, RLENGTH)
        $0 = substr($0, RSTART + RLENGTH)
        split(entry, part, "\"")
        printf "  %-13s %-8s %s\n", part[2], part[6], part[10]
    }
}
EOC
awk -f table.awk report.json

if [ "$failed" = 0 ]; then
    printf '\n%sDone: every step went as it should. Nothing is left: no process, mount, or file.%s\n' "$bold" "$plain"
else
    printf '\n%sDone, but not every step went as it should: see the lines with !! above.%s\n' "$bold" "$plain"
fi
exit "$failed"
