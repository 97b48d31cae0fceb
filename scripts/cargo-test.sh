#!/usr/bin/env bash
# usage: scripts/cargo-test.sh ARGUMENT…
# Runs `cargo test ARGUMENT…` to its end. A test that failed beside others is run again alone, up to AGAIN tests: if it
# passes, it is reported as unsteady, which is a defect to mend and no reason to lose everybody's work.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
(($#)) || die "usage: see the head of $0"
AGAIN=5

output=$(mktemp)
trap 'rm -f "$output"' EXIT
status=0
cargo test --no-fail-fast "$@" 2>&1 </dev/null | tee "$output" || status=$?
((status)) || exit 0

# The last list of a program that failed, after `failures:`, has the names of its tests; cargo's own lines are indented as well.
# Colours are taken out.
mapfile -t failed < <(sed 's/\x1b\[[0-9;]*m//g' "$output" | awk '
    /^failures:$/ { is_list = 1; list = ""; next }
    /^test result: FAILED/ { printf "%s", list }
    /^test result:/ { is_list = 0; list = "" }
    is_list && /^    [^ ]/ { list = list substr($0, 5) "\n" }' | sort -u)
((${#failed[@]})) || die "failed before or outside of a test"
# A program that was ended by a signal has no result, and its tests would not be run again.
programs=$(grep -c '^error: test failed, to rerun pass' "$output" || true)
results=$(sed 's/\x1b\[[0-9;]*m//g' "$output" | grep -c '^test result: FAILED' || true)
((programs == results)) || die "$programs test programs failed, $results of them with a result"
((${#failed[@]} <= AGAIN)) || die "${#failed[@]} tests failed: ${failed[*]}"
for test in "${failed[@]}"; do
    say "$test failed; running it again alone"
    cargo test "$@" -- --exact "$test" </dev/null || die "$test failed twice"
done
say "unsteady, passed alone: ${failed[*]}"
