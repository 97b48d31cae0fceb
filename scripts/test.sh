#!/usr/bin/env bash
# usage: test.sh         what `make test` promises: units, then end-to-end cases that touch each promise once
#        test.sh rest    everything else
# Runs each part to its end, also after one failed, and ends with a table. The output of a part is in target/test/PART.log.
# TEST_UNTIL (seconds since 1970): later than that no part begins; the table says which were not run.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
LOGS=$ROOT/target/test
# The start-up gate is bounded: an emulator that loses guests, or a slow machine, says nothing of starts.
GATE_LIMIT=900
parts=(fast core)
case ${1:-} in
'') ;;
rest) parts=(guests stack-rest chart kvm deb soak fuzz gate versions rights) ;;
*) die "usage: see the head of $0" ;;
esac

run() {
    case $1 in
    soak | fuzz) make "$1" ;;
    gate)
        local status=0
        make node emulator || return
        timeout "$GATE_LIMIT" scripts/bench-gate.sh || status=$?
        case $status in
        3 | 124) echo "starts were not compared: not measured within $GATE_LIMIT s" ;;
        *) return $status ;;
        esac
        ;;
    *) make "test-$1" ;;
    esac
}

# counts PART: prints how many tests passed, failed and were passed over.
counts() { sed 's/\x1b\[[0-9;]*m//g' "$LOGS/$1.log" | awk -f scripts/test-counts.awk; }

mkdir -p "$LOGS"
began=$SECONDS
rows=() failed=0
for part in "${parts[@]}"; do
    if [[ -n ${TEST_UNTIL:-} ]] && (($(date +%s) > TEST_UNTIL)); then
        : >"$LOGS/$part.log"
        rows+=("$(printf '%-12s NOT RUN: no time is left' "$part")")
        continue
    fi
    say "$part begins"
    started=$SECONDS result=ok
    run "$part" 2>&1 </dev/null | tee "$LOGS/$part.log" || { result=FAILED && failed=$((failed + 1)); }
    read -r passed not over < <(counts "$part")
    rows+=("$(printf '%-12s %-7s %5d s %7d %7d %7d' "$part" "$result" $((SECONDS - started)) "$passed" "$not" "$over")")
done
printf '\n%-12s %-7s %7s %7s %7s %7s\n' part result time passed failed ignored
printf '%s\n' "${rows[@]}"
for part in "${parts[@]}"; do grep 'unsteady, passed alone' "$LOGS/$part.log" || true; done
printf 'all of it: %d s; the output of each part is in %s\n' $((SECONDS - began)) "${LOGS#"$ROOT"/}"
((failed == 0)) || die "$failed of ${#parts[@]} parts failed"
