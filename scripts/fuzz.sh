#!/usr/bin/env bash
# Runs every target of fuzz/, or those named, for so long each. What is found new is kept in target/fuzz/corpus,
# what breaks in fuzz/artifacts, which names the command that shows it again.
# usage: fuzz.sh SECONDS [TARGET…]
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

seconds=${1:?usage: fuzz.sh SECONDS [TARGET…]}
shift
targets=("$@")
((${#targets[@]})) || mapfile -t targets < <(basename -s .rs -a fuzz/fuzz_targets/*.rs)

fuzz=$(cargo_tool cargo-fuzz "${CARGO_FUZZ_VERSION:-0.13.1}")
# Without a sanitizer, and so with the toolchain that builds the rest: there is hardly any unsafe code to watch in
# what is fuzzed; panics, overflows, sizes and times are told all the same.
build=(--sanitizer none --target-dir target/fuzz/build)
"$fuzz" fuzz build "${build[@]}"

# run TARGET: for so long, or until an input breaks it.
run() {
    local corpus=target/fuzz/corpus/$1 log=target/fuzz/$1.log
    mkdir -p "$corpus"
    if ! "$fuzz" fuzz run "${build[@]}" "$1" "$corpus" "fuzz/seeds/$1" -- \
        -max_total_time="$seconds" -max_len=65536 -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 \
        >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        say "$1: broken by an input"
        return 1
    fi
    local runs
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    say "$1: ${runs:-?} inputs in $seconds s, $(find "$corpus" -type f | wc -l) kept"
}

# As many at a time as there are processors.
broken=0
for target in "${targets[@]}"; do
    if (($(jobs -rp | wc -l) >= $(nproc))); then wait -n || broken=$((broken + 1)); fi
    run "$target" &
done
while (($(jobs -p | wc -l))); do wait -n || broken=$((broken + 1)); done
((broken == 0)) || die "$broken of ${#targets[@]} targets were broken by an input"
