#!/usr/bin/env bash
# Beside a stack whose environment is sourced: compares the row `cpu` of `sandboxer-bench workload` on runc with the same command run by
# hand, by ctr, in a container of the same image, quota and memory. They alternate. Fails if their medians differ by more than 2 %.
# usage: by-hand.sh ROUNDS FILE       FILE gets the figures, one row each: round, by, events per second
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/../lib.sh"
(($# == 2)) || die "usage: see the head of $0"
rounds=$1 rows=$2
IMAGE=localhost/sandboxer/bench-small:latest
# Percent.
MAX_DIFFERENCE=2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# by_hand NAME COMMAND…: runs a command in a container as the row's containers are limited: one processor by quota, 512 MiB.
by_hand() {
    local name=$1
    shift
    ctr run --rm --runc-binary "$(command -v runc)" --cpus 1 --memory-limit $((512 << 20)) "$IMAGE" "$name" "$@"
}

# events: prints the events per second in sysbench's output.
events() { sed -n 's/.*events per second: *//p'; }

# median NUMBER…: prints the middle one, of an even count the lower of two.
median() { printf '%s\n' "$@" | sort -n | sed -n "$((($# + 1) / 2))p"; }

ours=() others=()
printf 'round,by,events_per_s\n' >"$rows"
for ((round = 0; round < rounds; round++)); do
    sandboxer-bench workload --probe cpu --runtime runc --repeat 1 --warm-up 0 --output "$work/$round" >/dev/null
    mapfile -t figures < <(sed -n 's/.*"events_per_s":\([0-9.]*\).*/\1/p' "$work/$round/runs.jsonl")
    # The first one's: `cpu one-thread`.
    IFS=, read -ra command < <(sed -n '1s/.*"tool":\[\([^]]*\)\].*/\1/p' "$work/$round/runs.jsonl" | tr -d '"')
    ((${#figures[@]} && ${#command[@]})) || die "the row cpu has no figure: $(tail -n 1 "$work/$round/runs.jsonl")"
    figure=$(by_hand "by-hand-$round" "${command[@]}" 2>"$work/error" | events)
    [[ -n $figure ]] || die "'${command[*]}' in a container of ctr has no result: $(tail -n 1 "$work/error")"
    printf '%s,row,%s\n' "$round" "${figures[0]}" >>"$rows"
    printf '%s,hand,%s\n' "$round" "$figure" >>"$rows"
    say "${command[*]}: row ${figures[0]}, by hand $figure"
    ours+=("${figures[0]}") others+=("$figure")
done
by_hand by-hand-facts bench-helper facts 2>/dev/null | tail -n 1
row=$(median "${ours[@]}") hand=$(median "${others[@]}")
difference=$(awk -v row="$row" -v hand="$hand" 'BEGIN { printf "%.3f", (row / hand - 1) * 100 }')
say "medians of $rounds each: row $row, by hand $hand; the row differs by $difference %"
awk -v difference="$difference" -v most=$MAX_DIFFERENCE 'BEGIN { exit !(difference <= most && -difference <= most) }' ||
    die "they differ by more than $MAX_DIFFERENCE %"
