#!/usr/bin/env bash
# Kills the worker at every point of a pod's life in a node VM, in virtual time. The first run records the points at which it died; the
# others replay them: the worker must die at the same points, in the same order. The node's seed fixes its random numbers, but its disks
# complete in the host's time, so what is replayed is points, not instructions.
# usage: replay-faults.sh [RUNS]          default: 2; EVERY=N takes only each Nth point, LIMIT bounds each run (2400 s)
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
OUT=$ROOT/target/replay-faults
runs=${1:-2}
[[ $runs =~ ^[1-9]$ ]] || die "usage: replay-faults.sh [RUNS]"
e2e=$(cargo test --quiet --no-run --message-format=json -p sandboxer-e2e --test e2e |
    sed -n 's|.*"executable":"\([^"]*/deps/e2e-[0-9a-f]*\)".*|\1|p')
[[ -n $e2e ]] || die "cargo named no test program"
rm -rf "$OUT"
scripts/node.sh build "$e2e"
for ((run = 1; run <= runs; run++)); do
    began=$SECONDS
    mkdir -p "$OUT/$run"
    status=0 replayed=()
    if ((run > 1)); then
        cp "$OUT/killed" "$OUT/$run/recorded"
        replayed=(--env SANDBOXER_E2E_REPLAY=/node/out/recorded)
    fi
    attended scripts/node.sh run --virtual-time --limit "${LIMIT:-2400}" --stall 300 --out "$OUT/$run" \
        --env SANDBOXER_E2E_STORY=/node/out/story --env SANDBOXER_E2E_EVERY_NTH_POINT="${EVERY:-1}" \
        --env SANDBOXER_E2E_LIMIT=7200 --env POOL=2 --env STACK_ACCELERATOR=kvm --env STACK_VMM=qemu --env SANDBOXER_E2E_HANDLERS=sandboxer "${replayed[@]}" -- \
        "$e2e" sandboxer::faults::killed_at_every_point --nocapture >"$OUT/$run/log" 2>&1 || status=$?
    say "run $run: exit code $status, $(wc -l <"$OUT/$run/story" 2>/dev/null || echo 0) points, $((SECONDS - began)) s"
    ((status == 0)) || { tail -n 15 "$OUT/$run/log" >&2; die "run $run failed; its output is $OUT/$run/log"; }
    [[ -s $OUT/$run/story ]] || die "run $run reported no point; its output is $OUT/$run/log"
    ((run > 1)) || grep '^killed at' "$OUT/1/story" >"$OUT/killed"
    cmp -s "$OUT/killed" <(grep '^killed at' "$OUT/$run/story") || {
        diff "$OUT/killed" "$OUT/$run/story" | head -n 20 >&2
        die "run $run differs from run 1: the first differences are above"
    }
done
say "in $runs runs the worker died at the same $(wc -l <"$OUT/killed") points in the same order: $OUT/killed"
