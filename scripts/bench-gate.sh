#!/usr/bin/env bash
# Checks whether starts became slower: measures boot, template and pool beside runc in a node VM, in virtual time, and compares them
# with the last rows of docs/results/history.csv. Fails beyond 5 %, and names the stage that grew. Bounded in time.
# It compares a few starts of each. If they are too slow, it measures again with more starts, which decide.
# usage: bench-gate.sh            compare
#        bench-gate.sh record     append to the history instead (make bench-record; commit it)
# BENCH_SERIAL changes the number of starts of each (6, twice as many the second time; 20 to record). CLOUD_HYPERVISOR and FIRECRACKER add these VMMs.
# exit codes: 0 not slower, or nothing to compare with; 1 slower; 3 not measured, which says nothing about starts.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=scripts/node/parts.sh
. "$(dirname "$0")/node/parts.sh"
cd "$ROOT"
OUT=$ROOT/target/bench-gate
BENCH=$ROOT/target/release/sandboxer-bench
HISTORY=$ROOT/docs/results/history.csv
mode=${1:-compare}
[[ $mode == compare || $mode == record ]] || die "usage: bench-gate.sh [record]"
if [[ $mode == compare && ! -e $HISTORY ]]; then
    say "skipped: there is no $HISTORY to compare with: make bench-record"
    exit 0
fi
commit=$(git rev-parse --short HEAD)
[[ -z $(git status --porcelain --untracked-files=no) ]] || commit+=-dirty
failed=0

# measure VMM STARTS: measures in parts of two starts of each, like bench-kvm.sh.
measure() {
    local began=$SECONDS
    rm -rf "${OUT:?}/$1" "${OUT:?}/parts"
    in_parts "$OUT" "$1" $((($2 + 1) / 2)) 2 0 sandboxer sandboxer-template sandboxer-boot runc -- \
        --memory 4096 --limit "${BENCH_LIMIT:-1800}" --env STACK_VMM="$1" || { say "cannot measure $1: see above"; exit 3; }
    say "$1: measured in $((SECONDS - began)) s"
}

compare() { "$BENCH" gate "$OUT/$1" --history "$HISTORY"; }

rm -rf "$OUT"
for vmm in qemu ${CLOUD_HYPERVISOR:+cloud-hypervisor} ${FIRECRACKER:+firecracker}; do
    if [[ $mode == record ]]; then
        measure "$vmm" "${BENCH_SERIAL:-20}"
        "$BENCH" gate "$OUT/$vmm" --history "$HISTORY" --record --commit "$commit"
        continue
    fi
    measure "$vmm" "${BENCH_SERIAL:-6}"
    compare "$vmm" && continue
    say "$vmm: measuring again, since a few starts may be slow by chance"
    measure "$vmm" "$((2 * ${BENCH_SERIAL:-6}))"
    compare "$vmm" || failed=1
done
exit $failed
