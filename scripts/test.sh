#!/usr/bin/env bash
# usage: test.sh         what `make test` promises: units, then end-to-end cases that touch each promise once
#        test.sh rest    everything else
# Runs each part to its end, also after one failed, and ends with a table. The output of a part is in target/test/PART.log.
# TEST_UNTIL (seconds since 1970): a part that would not end by then is not begun, by its usual time and by how slow this machine has
# been so far; the table says which were not run.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
LOGS=$ROOT/target/test
# The start-up gate is bounded: an emulator that loses guests, or a slow machine, says nothing of starts.
GATE_LIMIT=900
# Seconds that each part takes on two cores when nothing is built.
declare -A usual=([fast]=300 [core]=530 [guests]=480 [stack-rest]=1300 [chart]=630 [kvm]=720 [deb]=420 [soak]=130 [fuzz]=420 [gate]=430
    [versions]=400 [rights]=130 [docker]=900 [crio]=900)
# The usual and the real seconds of the parts that were run since `make test` began.
SPEED=$LOGS/speed
parts=(fast core)
case ${1:-} in
'') ;;
rest)
    parts=(guests stack-rest chart kvm deb soak fuzz gate)
    # What these build first takes up to half an hour.
    [[ -n ${TEST_UNTIL:-} ]] || parts+=(versions rights docker crio)
    ;;
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

# fits PART: whether it would end in time. A fifth is added to what is expected.
fits() {
    [[ -n ${TEST_UNTIL:-} ]] || return 0
    local due real
    read -r due real < <(awk '{ due += $1; real += $2 } END { print due + 0, real + 0 }' "$SPEED")
    ((due > 0 && real > due)) || { due=1 real=1; }
    (($(date +%s) + ${usual[$1]} * 6 / 5 * real / due <= TEST_UNTIL))
}

mkdir -p "$LOGS"
[[ ${1:-} == rest && -e $SPEED ]] || : >"$SPEED"
began=$SECONDS
rows=() failed=0
for part in "${parts[@]}"; do
    if ! fits "$part"; then
        : >"$LOGS/$part.log"
        rows+=("$(printf '%-12s NOT RUN: too little time is left' "$part")")
        continue
    fi
    say "$part begins"
    started=$SECONDS result=ok
    run "$part" 2>&1 </dev/null | tee "$LOGS/$part.log" || { result=FAILED && failed=$((failed + 1)); }
    echo "${usual[$part]} $((SECONDS - started))" >>"$SPEED"
    read -r passed not over < <(counts "$part")
    rows+=("$(printf '%-12s %-7s %5d s %7d %7d %7d' "$part" "$result" $((SECONDS - started)) "$passed" "$not" "$over")")
done
printf '\n%-12s %-7s %7s %7s %7s %7s\n' part result time passed failed ignored
printf '%s\n' "${rows[@]}"
for part in "${parts[@]}"; do grep 'unsteady, passed alone' "$LOGS/$part.log" || true; done
printf 'all of it: %d s; the output of each part is in %s\n' $((SECONDS - began)) "${LOGS#"$ROOT"/}"
((failed == 0)) || die "$failed of ${#parts[@]} parts failed"
