#!/usr/bin/env bash
# Makes several targets at the same time, and says how far each is. The first that fails ends the others, and the end of its
# output is shown.
# usage: side-by-side.sh TARGET…
# Each target's output is in target/logs/TARGET.log. On a terminal there is one live line for all; elsewhere a line now and then.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
(($#)) || die "usage: see the head of $0"
LOGS=$ROOT/target/logs
# Seconds between two lines where there is no terminal.
PAUSE=60
# Lines that are shown of a target that failed.
SHOWN=30
# Steps of a target of which nothing is built yet, as `steps_done` counts them; without an entry, only its time is shown.
declare -A steps=([programs]=448 [kernel]=1950)
declare -A pids=() outcome=()

# Each target is a process group of its own: what it has started ends with it.
end() {
    trap - INT TERM HUP EXIT
    local target
    for target in "${!pids[@]}"; do kill -TERM -- "-${pids[$target]}" 2>/dev/null || true; done
    # A second Ctrl-C must not cut their tidying short.
    trap '' INT TERM HUP
    wait
}

# steps_done TARGET: prints how many crates or objects of it were compiled.
steps_done() {
    case $1 in
    kernel) find "$CACHE"/kernel/.*/objects -name '*.o' 2>/dev/null | wc -l ;;
    *) grep -c '^ *Compiling' "$LOGS/$1.log" || true ;;
    esac
}

# state TARGET: prints what is known of it.
state() {
    [[ -z ${outcome[$1]:-} ]] || { printf '%s %s' "$1" "${outcome[$1]}" && return; }
    local passed=$((SECONDS - started)) most=${steps[$1]:-0} part=0
    ((most == 0)) || part=$((100 * $(steps_done "$1") / most))
    ((part < 100)) || part=99
    ((part >= 5)) || { printf '%s %d s' "$1" "$passed" && return; }
    printf '%s %d %%, %d s left' "$1" "$part" $((passed * (100 - part) / part))
}

progress() {
    local target line=
    for target in "$@"; do line+="${line:+; }$(state "$target")"; done
    if [[ -t 2 ]]; then printf '\r\033[K%s' "$line" >&2; else say "$line"; fi
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
    : >"$LOGS/$target.log"
    make -C "$ROOT" "$target" >"$LOGS/$target.log" 2>&1 </dev/null &
    pids[$target]=$!
done
set +m
say "making at the same time: $*; output is in $LOGS"
[[ ! -t 2 ]] || PAUSE=1
shown=$SECONDS
while ((${#pids[@]})); do
    sleep 1
    for target in "${!pids[@]}"; do look "$target"; done
    ((${#failed[@]} == 0)) || break
    ((SECONDS - shown < PAUSE)) || { shown=$SECONDS && progress "$@"; }
done
progress "$@"
[[ ! -t 2 ]] || echo >&2
((${#failed[@]})) || exit 0
end
for target in "${failed[@]}"; do
    tail -n "$SHOWN" "$LOGS/$target.log" >&2
    say "$target failed: the lines above are the end of $LOGS/$target.log"
done
exit 1
