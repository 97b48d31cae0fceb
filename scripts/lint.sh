#!/usr/bin/env bash
# Dependencies against deny.toml, and the scripts' own syntax.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

DENY=${CARGO_DENY_VERSION:-0.20.2}
deny=$CACHE/tools/cargo-deny-$DENY/bin/cargo-deny

install_deny() {
    [[ ! -x $deny ]] || return 0
    say "building cargo-deny $DENY into the cache (about three minutes on two cores, once)"
    local build
    build=$(mktemp -d)
    cargo install --quiet --locked --version "$DENY" --root "${deny%/bin/*}" --target-dir "$build" cargo-deny
    rm -rf "$build"
}

for script in scripts/*.sh .ci/run; do bash -n "$script"; done
if command -v shellcheck >/dev/null; then
    shellcheck -x -S warning scripts/*.sh .ci/run
else
    say "skipped: shellcheck of scripts/*.sh (not installed)"
fi

with_lock "$CACHE/tools/.lock" install_deny
"$deny" --locked check --hide-inclusion-graph bans licenses sources
# Advisories come from a repository that not every builder can reach.
if "$deny" --locked fetch db 2>/dev/null; then
    "$deny" --locked check --disable-fetch advisories
else
    say "skipped: security advisories (the advisory database could not be fetched)"
fi
