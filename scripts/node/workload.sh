#!/usr/bin/env bash
# In a node VM whose payload was made with NODE_BENCH=1: measures workloads on a stack of its own, gVisor included, and writes the
# result to $NODE_OUT/NAME.
# usage: workload.sh NAME ARGUMENT…   the arguments are those of `sandboxer-bench workload`
# STACK_VMM and POOL are the stack's. WORKLOAD_DAEMON=no leaves sandboxer out, for other runtimes alone, STACK_GVISOR=0 gVisor.
# WORKLOAD_VM=yes names the disk of the series `vm` (payload: NODE_VM=1). WORKLOAD_BY_HAND=N compares the row `cpu` with sysbench by
# hand first, N times: see by-hand.sh. A file $NODE_OUT/NAME.stop ends the measurement as Ctrl-C does: its result is partial.
# Volumes are on a disk in memory: in virtual time, waiting for the host's disk would take as long as the next tick of a timer.
# The probe runs in the network namespace of the pods' bridge, where servers of the series native are at 192.0.2.1.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/../lib.sh"
(($# >= 2)) || die "usage: see the head of $0"
name=$1
shift
at=/tmp
[[ ! -d /disk ]] || at=/disk
export STACK_ACCELERATOR=kvm STACK_GVISOR=${STACK_GVISOR:-1} POOL=${POOL:-1}

finish() {
    local status=$?
    for log in sandboxer containerd; do cp "$at/stack/$log/log" "$NODE_OUT/$name.$log.log" 2>/dev/null || true; done
    exit $status
}

# Makes a file system at $at/volumes.
memory_disk() {
    mkdir -p "$at/memory" "$at/volumes"
    mount -t tmpfs -o size=4G memory "$at/memory"
    truncate -s 3G "$at/memory/disk"
    mkfs.ext4 -q -F "$at/memory/disk"
    mount -o loop "$at/memory/disk" "$at/volumes"
}

# idle_ticks: prints for how many hundredths of a second the processors have been idle.
idle_ticks() { awk '$1 == "cpu" { print $5 + $6 }' /proc/stat; }

# Waits until the processors are idle for two seconds: the daemon still fills its pool, and images were just unpacked.
quiet() {
    local before try
    for ((try = 0; try < 60; try++)); do
        before=$(idle_ticks)
        sleep 2
        (($(idle_ticks) - before < 196 * $(nproc))) || return 0
    done
    say "the processors are still busy after 120 s"
}

# measure DIR ARGUMENT…: measures, and writes the result to DIR.
measure() {
    local output=$1
    shift
    COLUMNS=200 nsenter --net="$at/stack/cni/netns" sandboxer-bench workload --native-address 192.0.2.1 "${vm[@]}" \
        --native-root "$at/native-bench-small" --native-build-root "$at/native-bench-build" --volumes "$at/volumes" --output "$output" "$@"
}

# stop_on FILE PID: interrupts a measurement when FILE exists.
stop_on() {
    while [[ ! -e $1 ]]; do sleep 20; done
    kill -INT "$2"
}

# measure_until FILE DIR ARGUMENT…: measures until it is done or FILE exists.
measure_until() {
    local stop=$1 pid watcher status=0
    shift
    measure "$@" &
    pid=$!
    # nsenter becomes the command, a child of this function's shell.
    until [[ -n $(pgrep -P $pid) ]] || ! kill -0 $pid 2>/dev/null; do sleep 0.1; done
    stop_on "$stop" "$(pgrep -P $pid | head -n 1)" &
    watcher=$!
    wait $pid || status=$?
    kill $watcher 2>/dev/null || true
    return $status
}

trap finish EXIT
daemon=() vm=() runtimes=()
# One short row of the same runtimes.
once=(--probe syscalls --repeat 1)
for ((index = 1; index < $#; index++)); do
    next=$((index + 1))
    case ${!index} in
    --runtime) runtimes+=(--runtime "${!next}") ;;
    --trust-limits) once+=(--trust-limits "${!next}") ;;
    esac
done
once+=("${runtimes[@]}")
[[ ${WORKLOAD_DAEMON:-yes} == yes ]] || daemon=(--no-daemon)
[[ ${WORKLOAD_VM:-} != yes ]] || vm=(--vm-address 192.0.2.1 --vm-image "$(scripts/bench-vm.sh)")
scripts/stack.sh up "$at/stack" "${daemon[@]}"
# An emulated processor unpacks an image for minutes.
images=(bench-small)
[[ " $* " == *' --probe '* && " $* " != *' --probe pipeline '* ]] || images+=(bench-build)
scripts/stack.sh load "$at/stack" "${images[@]}"
for image in "${images[@]}"; do
    [[ " ${runtimes[*]} " == *' native '* ]] || break
    scripts/bench-image.sh "$image" "$ROOT/target/bench-helper/x86_64-unknown-linux-gnu/release/bench-helper" "$at/native-$image" >/dev/null
done
# shellcheck source=/dev/null
. "$at/stack/env"
memory_disk
quiet
# First pods of each runtime, in no figure: what they need is then in the node's memory, in each part of a measurement.
measure "$at/first" "${once[@]}" >/dev/null
by_hand=0
[[ -z ${WORKLOAD_BY_HAND:-} ]] || scripts/node/by-hand.sh "$WORKLOAD_BY_HAND" "$NODE_OUT/$name-by-hand.csv" || by_hand=$?
say "measuring at $(cut -d' ' -f1 /proc/uptime) s"
measure_until "$NODE_OUT/$name.stop" "$NODE_OUT/$name" "$@"
exit $by_hand
