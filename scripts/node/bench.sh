#!/usr/bin/env bash
# In a node VM: measures pods on a stack of its own.
# usage: bench.sh startup NAME FIRST PARTS SERIAL GROUP HANDLER…  PARTS parts, $NODE_OUT/NAME.FIRST and following: SERIAL starts of each
#                                                                 and a group of GROUP (0: no group)
#        bench.sh memory NAME COUNTS HANDLER…                     COUNTS of pods, such as 1,10,50, into $NODE_OUT/NAME
#        bench.sh commands NAME COUNT HANDLER…                    COUNT commands in a container of each, into $NODE_OUT/NAME
#        bench.sh checkpoint NAME MIB ROUNDS COPIES HANDLER…      saves, starts from there and COPIES at once, MIB (such as 16,128) filled, into $NODE_OUT/NAME
# Of a payload that was made with NODE_VM=1, HANDLER may be vm; it may be native in any.
# Of a stack with STACK_GVISOR=1, whose payload has gVisor, HANDLER may be gvisor. BENCH_ARGUMENTS are further arguments of `sandboxer-cli startup`
# or `mem-report`, such as "--network host --baseline runc".
# NODE_PREPARE names a script that is sourced before the stack starts. STACK_VMM, STACK_SUFFIX and POOL are the stack's. PAUSE is the time between starts (seconds of the node's clock, default 4: the
# pool fills). START_TIMEOUT (60) bounds one start. BENCH_DAEMON=no leaves sandboxer out, for other runtimes alone.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/../lib.sh"
(($# >= 4)) || die "usage: see the head of $0"
verb=$1 name=$2
shift 2
dir=/tmp/stack
export STACK_ACCELERATOR=kvm POOL=${POOL:-2}

# With sleep=off the clock jumps during a read from disk, so all programs of a start are read before.
warm() {
    find /usr/lib/cni "$CACHE/tools" target/release target/guest /usr/share/seabios /usr/share/qemu \
        /usr/bin/qemu-system-x86_64* /usr/local/bin -type f -exec cat {} + >/dev/null 2>&1 || true
    find /usr/lib/x86_64-linux-gnu -name '*.so*' -exec cat {} + >/dev/null 2>&1 || true
}

# The first VMs are made before the measurement. Virtual time costs nothing while nothing runs.
settle() {
    local try
    for try in {1..60}; do
        (($(pgrep -fc 'qemu-system|cloud-hypervisor|firecracker' || true) < POOL)) || break
        sleep 5
    done
    sleep 20
    say "the stack is up at $(cut -d' ' -f1 /proc/uptime) s, after $try checks"
}

# part N WARM_UP: measures one part.
part() {
    local at=$NODE_OUT/$name.$1 status=0
    rm -rf "$at.new"
    COLUMNS=180 sandboxer-cli startup "${runtimes[@]}" "${vm_disk[@]}" "${more[@]}" --serial "$serial" --parallel "$group" --rounds 1 --warm-up "$2" \
        --pause "${PAUSE:-4}" --timeout "${START_TIMEOUT:-60}" --output "$at.new" || status=$?
    mv "$at.new" "$at"
    return $status
}

finish() {
    local status=$?
    local log
    # Why another runtime's start fails is in containerd's.
    for log in sandboxer containerd; do cp "$dir/$log/log" "$NODE_OUT/$name.$log.log" 2>/dev/null || true; done
    exit $status
}

# What another runtime of the stack needs.
# shellcheck source=/dev/null
[[ -z ${NODE_PREPARE:-} ]] || . "$NODE_PREPARE"
warm
trap finish EXIT
daemon=() client=()
[[ ${BENCH_DAEMON:-yes} == yes ]] || daemon=(--no-daemon) client=(--client) POOL=0
scripts/stack.sh up "$dir" "${daemon[@]}"
# shellcheck source=/dev/null
. "$dir/env"
sandboxer-cli version "${client[@]}"
settle
runtimes=() vm_disk=() failed=0
read -ra more <<<"${BENCH_ARGUMENTS:-}"
[[ " $* " != *' vm '* ]] || vm_disk=(--vm-image "$(scripts/bench-vm.sh)")
case $verb in
startup)
    (($# >= 5)) || die "usage: see the head of $0"
    first=$1 parts=$2 serial=$3 group=$4
    shift 4
    for handler in "$@"; do runtimes+=(--runtime "$handler"); done
    for ((n = first; n < first + parts; n++)); do part "$n" "$((n == first))" || failed=$?; done
    ;;
memory)
    counts=$1
    shift
    for handler in "$@"; do runtimes+=(--runtime "$handler"); done
    COLUMNS=180 sandboxer-cli mem-report "${runtimes[@]}" "${vm_disk[@]}" "${more[@]}" --sweep "$counts" --repeat 1 --timeout 300 --output "$NODE_OUT/$name"
    ;;
commands)
    count=$1
    shift
    for handler in "$@"; do runtimes+=(--runtime "$handler"); done
    mkdir -p "$NODE_OUT/$name"
    COLUMNS=180 sandboxer-bench streams "${runtimes[@]}" "${more[@]}" --execs "$count" --logs 0 --output "$NODE_OUT/$name/report.json"
    ;;
checkpoint)
    mib=$1 rounds=$2 copies=$3
    shift 3
    for handler in "$@"; do runtimes+=(--runtime "$handler"); done
    mkdir -p "$NODE_OUT/$name"
    COLUMNS=180 sandboxer-bench checkpoints "${runtimes[@]}" "${more[@]}" --mib "$mib" --rounds "$rounds" --copies "$copies" --timeout "${START_TIMEOUT:-300}" \
        --output "$NODE_OUT/$name/report.json"
    ;;
*) die "no such measurement '$verb'" ;;
esac
say "measured at $(cut -d' ' -f1 /proc/uptime) s"
# Of a start that failed: it is in the figures.
exit $failed
