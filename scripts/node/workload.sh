#!/usr/bin/env bash
# In a node VM whose payload was made with NODE_BENCH=1: measures workloads on a stack of its own, gVisor included, and writes the
# result to $NODE_OUT/NAME.
# usage: workload.sh NAME ARGUMENT…   the arguments are those of `sandboxer-cli workload`
# STACK_VMM and POOL are the stack's. WORKLOAD_DAEMON=no leaves sandboxer out, for other runtimes alone.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/../lib.sh"
(($# >= 2)) || die "usage: see the head of $0"
name=$1
shift
at=/tmp
[[ ! -d /disk ]] || at=/disk
export STACK_ACCELERATOR=kvm STACK_GVISOR=1 POOL=${POOL:-1}

finish() {
    local status=$?
    for log in sandboxer containerd; do cp "$at/stack/$log/log" "$NODE_OUT/$name.$log.log" 2>/dev/null || true; done
    exit $status
}

trap finish EXIT
daemon=()
[[ ${WORKLOAD_DAEMON:-yes} == yes ]] || daemon=(--no-daemon)
scripts/stack.sh up "$at/stack" "${daemon[@]}"
scripts/stack.sh load "$at/stack" bench-small bench-build
for image in bench-small bench-build; do
    scripts/bench-image.sh "$image" "$ROOT/target/bench-helper/x86_64-unknown-linux-gnu/release/bench-helper" "$at/native-$image" >/dev/null
done
# shellcheck source=/dev/null
. "$at/stack/env"
mkdir -p "$at/volumes"
say "measuring at $(cut -d' ' -f1 /proc/uptime) s"
COLUMNS=200 sandboxer-cli workload --native-root "$at/native-bench-small" --native-build-root "$at/native-bench-build" --volumes "$at/volumes" --output "$NODE_OUT/$name" "$@"
