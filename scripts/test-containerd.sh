#!/usr/bin/env bash
# Runs end-to-end cases beside several versions of containerd, and writes what came of it into docs/compatibility.md.
#   test-containerd.sh CASES VERSION…    CASES as for SANDBOXER_E2E_ONLY, or `all`
# Each version is built from its Go modules into the cache, once. One version that fails does not keep the next from being run.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
[[ $# -ge 2 ]] || die "usage: test-containerd.sh CASES VERSION…"
cases=$1
shift

failed=()
for version in "$@"; do
    export CONTAINERD_VERSION=$version
    "$ROOT/scripts/tools.sh" >/dev/null
    say "containerd $version"
    only=(SANDBOXER_E2E_ONLY="$cases")
    [[ $cases != all ]] || only=()
    env "${only[@]}" SANDBOXER_E2E_HANDLERS=sandboxer SANDBOXER_E2E_VERSIONS="$ROOT/docs/compatibility.md" \
        cargo test --quiet --manifest-path "$ROOT/Cargo.toml" -p sandboxer-e2e --test e2e || failed+=("$version")
done
[[ ${#failed[@]} == 0 ]] || die "failed beside containerd ${failed[*]}"
