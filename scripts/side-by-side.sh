#!/usr/bin/env bash
# Makes several targets at the same time, says how long each took, and shows the output of those that failed.
# usage: side-by-side.sh TARGET…
# Each target's output is in target/logs/TARGET.log.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
(($#)) || die "usage: see the head of $0"
LOGS=$ROOT/target/logs
# Seconds between two lines of progress.
PAUSE=30
# Lines that are shown of a target that failed.
SHOWN=30
declare -A pids=() outcome=()

# Each target is a process group of its own: what it has started ends with it.
end() {
    trap - INT TERM HUP EXIT
    local target
    for target in "${!pids[@]}"; do kill -TERM -- "-${pids[$target]}" 2>/dev/null || true; done
    wait
}

# state TARGET: prints what is known of it.
state() { printf '%s %s' "$1" "${outcome[$1]:-running for $((SECONDS - started)) s}"; }

progress() {
    local target line=
    for target in "$@"; do line+="${line:+; }$(state "$target")"; done
    say "$line"
}

# look TARGET: notes its end.
look() {
    local target=$1 status=0
    [[ ! -e /proc/${pids[$target]} ]] || return 0
    wait "${pids[$target]}" || status=$?
    outcome[$target]="took $((SECONDS - started)) s"
    ((status == 0)) || { outcome[$target]="failed after $((SECONDS - started)) s" && failed+=("$target"); }
    unset "pids[$target]"
}

mkdir -p "$LOGS"
failed=()
started=$SECONDS
trap 'end; exit 130' INT TERM HUP
trap end EXIT
set -m
for target in "$@"; do
    make -C "$ROOT" "$target" >"$LOGS/$target.log" 2>&1 </dev/null &
    pids[$target]=$!
done
set +m
say "making at the same time: $*; output is in $LOGS"
shown=$SECONDS
while ((${#pids[@]})); do
    sleep 1
    for target in "${!pids[@]}"; do look "$target"; done
    ((SECONDS - shown < PAUSE)) || { shown=$SECONDS && progress "$@"; }
done
progress "$@"
for target in "${failed[@]}"; do
    say "the last lines of $LOGS/$target.log:"
    tail -n "$SHOWN" "$LOGS/$target.log" >&2
done
((${#failed[@]} == 0))
