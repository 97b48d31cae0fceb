#!/usr/bin/env bash
# Whether starts became slower: boot, template and pool beside runc in a node VM, in virtual time, compared with what was
# recorded last in docs/results/history.csv. Fails beyond 5 %, and names the stage that grew. Bounded in time.
# usage: bench-gate.sh            compare
#        bench-gate.sh record     append to the history instead (make bench-record; commit it)
# BENCH_SERIAL changes the number of starts of each (5); CLOUD_HYPERVISOR adds that VMM.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
OUT=$ROOT/target/bench-gate
CLI=$ROOT/target/release/sandboxer-cli
HISTORY=$ROOT/docs/results/history.csv
mode=${1:-compare}
[[ $mode == compare || $mode == record ]] || die "usage: bench-gate.sh [record]"
if [[ $mode == compare && ! -e $HISTORY ]]; then
    say "skipped: there is no $HISTORY yet to compare with: make bench-record"
    exit 0
fi
commit=$(git rev-parse --short HEAD)
[[ -z $(git status --porcelain --untracked-files=no) ]] || commit+=-dirty
failed=0
rm -rf "$OUT"
for vmm in qemu ${CLOUD_HYPERVISOR:+cloud-hypervisor}; do
    mkdir -p "$OUT"
    began=$SECONDS status=0
    scripts/node.sh run --virtual-time --limit "${BENCH_LIMIT:-600}" --append kvm_amd.npt=0 --out "$OUT" --env STACK_VMM="$vmm" -- \
        scripts/node/bench.sh startup "$vmm" "${BENCH_SERIAL:-5}" 0 0 sandboxer sandboxer-template sandboxer-boot runc \
        >"$OUT/$vmm.log" 2>&1 </dev/null || status=$?
    say "$vmm: measured in $((SECONDS - began)) s"
    if ((status)); then
        tail -n 20 "$OUT/$vmm.log" >&2
        die "$vmm could not be measured: exit code $status"
    fi
    if [[ $mode == record ]]; then
        "$CLI" gate "$OUT/$vmm" --history "$HISTORY" --record --commit "$commit"
    else
        "$CLI" gate "$OUT/$vmm" --history "$HISTORY" || failed=1
    fi
done
exit $failed
