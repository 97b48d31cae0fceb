#!/usr/bin/env bash
# In a node VM: measures pods on a stack of its own and leaves the result in $NODE_OUT/NAME.
# usage: bench.sh startup NAME SERIAL GROUP ROUNDS HANDLER…     SERIAL starts each, ROUNDS groups of GROUP at once (0: none)
#        bench.sh memory NAME COUNTS HANDLER…                   COUNTS of pods, such as 1,10,50
# STACK_VMM, STACK_SUFFIX and POOL are the stack's; PAUSE rests between starts (virtual seconds, default 4: the pool fills).
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/../lib.sh"
(($# >= 4)) || die "usage: see the head of $0"
verb=$1 name=$2
shift 2
dir=/tmp/stack
export STACK_ACCELERATOR=kvm POOL=${POOL:-2}

# With sleep=off a clock jumps while something is read from a disk: what runs in a start is read before.
warm() {
    find /usr/lib/cni "$CACHE/tools" target/release target/guest /usr/share/seabios /usr/share/qemu \
        /usr/bin/qemu-system-x86_64 /usr/local/bin -type f -exec cat {} + >/dev/null 2>&1 || true
    find /usr/lib/x86_64-linux-gnu -name '*.so*' -exec cat {} + >/dev/null 2>&1 || true
}

# The first machines are made while nothing is measured. Virtual time costs nothing where nothing runs.
settle() {
    local try
    for try in {1..60}; do
        (($(pgrep -fc 'qemu-system|cloud-hypervisor' || true) < POOL)) || break
        sleep 5
    done
    sleep 20
    say "the stack is up at $(cut -d' ' -f1 /proc/uptime) s, after $try looks"
}

finish() {
    local status=$?
    cp "$dir/sandboxer/log" "$NODE_OUT/$name.sandboxer.log" 2>/dev/null || true
    exit $status
}

warm
trap finish EXIT
scripts/stack.sh up "$dir"
# shellcheck source=/dev/null
. "$dir/env"
sandboxer-cli version
settle
runtimes=()
case $verb in
startup)
    (($# >= 4)) || die "usage: see the head of $0"
    serial=$1 group=$2 rounds=$3
    shift 3
    for handler in "$@"; do runtimes+=(--runtime "$handler"); done
    COLUMNS=180 sandboxer-cli startup "${runtimes[@]}" --serial "$serial" --parallel "$group" --rounds "$rounds" \
        --pause "${PAUSE:-4}" --timeout 300 --output "$NODE_OUT/$name"
    ;;
memory)
    counts=$1
    shift
    for handler in "$@"; do runtimes+=(--runtime "$handler"); done
    COLUMNS=180 sandboxer-cli mem-report "${runtimes[@]}" --sweep "$counts" --repeat 1 --timeout 300 --output "$NODE_OUT/$name"
    ;;
*) die "no such measurement '$verb'" ;;
esac
say "measured at $(cut -d' ' -f1 /proc/uptime) s"
