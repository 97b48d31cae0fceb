#!/usr/bin/env bash
# `make demo`: starts a stack in target/demo, runs the CLI's demo on it, removes everything, and checks that nothing
# is left, also if the demo fails.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
DIR=$ROOT/target/demo
REPORT=$ROOT/target/demo-report
started=$SECONDS

finish() {
    local status=$?
    trap - EXIT INT TERM
    "$ROOT/scripts/stack.sh" down "$DIR" || status=1
    "$ROOT/scripts/leftovers.sh" check "$DIR" "$before" || status=1
    rm -f "$before"
    say "$([[ $status == 0 ]] && echo "done" || echo "failed") after $((SECONDS - started)) s"
    exit $status
}

# Leftovers of an earlier demo that was killed must not affect this comparison.
"$ROOT/scripts/stack.sh" down "$DIR" 2>/dev/null
before=$(mktemp)
"$ROOT/scripts/leftovers.sh" record "$DIR" "$before"
trap finish EXIT
trap 'exit 130' INT TERM

rm -rf "$REPORT"
"$ROOT/scripts/stack.sh" up "$DIR"
# shellcheck disable=SC1091
. "$DIR/env"
sandboxer-cli demo --kill-daemon --output "$REPORT" "$@"
