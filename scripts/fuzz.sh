#!/usr/bin/env bash
# Runs every target of fuzz/, or the named ones, for SECONDS each. New inputs are kept in target/fuzz/corpus, failing ones
# in fuzz/artifacts, with the command that reproduces the failure.
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
# Without a sanitizer, so the usual toolchain works. The fuzzed code has hardly any unsafe code. Panics, overflows,
# sizes and timeouts are still reported.
build=(--sanitizer none --target-dir target/fuzz/build)
"$fuzz" fuzz build "${build[@]}"

# run TARGET: runs it for $seconds, or until an input fails.
run() {
    local corpus=target/fuzz/corpus/$1 log=target/fuzz/$1.log
    mkdir -p "$corpus"
    if ! "$fuzz" fuzz run "${build[@]}" "$1" "$corpus" "fuzz/seeds/$1" -- \
        -max_total_time="$seconds" -max_len=65536 -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 \
        >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        say "$1: an input fails"
        return 1
    fi
    local runs
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    say "$1: ${runs:-?} inputs in $seconds s, $(find "$corpus" -type f | wc -l) kept"
}

# Runs as many targets at a time as there are processors.
broken=0
for target in "${targets[@]}"; do
    if (($(jobs -rp | wc -l) >= $(nproc))); then wait -n || broken=$((broken + 1)); fi
    run "$target" &
done
while (($(jobs -p | wc -l))); do wait -n || broken=$((broken + 1)); done
((broken == 0)) || die "$broken of ${#targets[@]} targets fail on an input"
