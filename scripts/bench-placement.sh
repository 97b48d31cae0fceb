#!/usr/bin/env bash
# Measures what a NUMA node of its own gains a pod (benches/placement.rs), in a node VM that has two nodes. All its memory is as fast, since it
# is emulated: throughput says nothing of placement there, the local share does. On a host with two nodes: cargo bench -p sandboxer-e2e --bench placement.
# usage: bench-placement.sh [PROGRAM]     PROGRAM: the bench, if it is built and in the node's payload already
# The plan is small, since guests in an emulated node are slow; SANDBOXER_BENCH_… (see the bench) change it. The output is
# target/bench-placement.log.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
helper=$ROOT/target/bench-helper/x86_64-unknown-linux-gnu/release/bench-helper
program=${1:-}
if [[ -z $program ]]; then
    # The measured program is bench-helper: this one only starts it.
    program=$(cargo test --quiet --no-run --message-format=json -p sandboxer-e2e --bench placement |
        sed -n 's|.*"executable":"\([^"]*/deps/placement-[0-9a-f]*\)".*|\1|p')
    [[ -n $program ]] || die "cargo named no program"
    scripts/node.sh build "$program" "$helper"
fi
log=$ROOT/target/bench-placement.log
plan=(SANDBOXER_BENCH_ROUNDS=2 "SANDBOXER_BENCH_PODS=1,2,4" "SANDBOXER_BENCH_RATES=10,20,40,80,160,320" SANDBOXER_BENCH_BOUND_MS=200 SANDBOXER_BENCH_SECONDS=8)
options=()
for of in "${plan[@]}"; do
    name=${of%%=*}
    options+=(--env "$name=${!name:-${of#*=}}")
done
scripts/node.sh run --cpus 4 --memory 8192 --numa 2 --limit "${BENCH_LIMIT:-3000}" --stall 600 --out "$ROOT/target/bench-placement" \
    --env STACK_VMM=qemu --env STACK_ACCELERATOR=kvm "${options[@]}" -- "$program" 2>&1 | tee "$log"
