#!/usr/bin/env bash
# Builds the agent of the release before from this clone's history, into the cache, and prints its path: guests that an older build has
# started keep running their agent. scripts/agent-before.commit names the commit; a release puts its own there.
# usage: agent-before.sh       exit 3: the clone has no such commit, as a shallow one hasn't
# The first build takes some minutes on two cores; the second call takes none.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

COMMIT=$(<"$ROOT/scripts/agent-before.commit")
[[ $COMMIT =~ ^[0-9a-f]{40}$ ]] || die "scripts/agent-before.commit has no commit: '$COMMIT'"
if ! git -C "$ROOT" cat-file -e "$COMMIT^{tree}" 2>/dev/null; then
    say "no agent of the release before: this clone has no commit $COMMIT (git fetch --unshallow)"
    exit 3
fi

# What it does counts here, not its size and speed.
export CARGO_PROFILE_RELEASE_LTO=false CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_INCREMENTAL=0
unset MAKEFLAGS MAKELEVEL CARGO_TARGET_DIR RUSTFLAGS SANDBOXER_PROFILE

# build FILE: by that commit's own recipe.
build() {
    local tree status=0
    [[ ! -e $1 ]] || return 0
    say "building the agent of $COMMIT into the cache (some minutes on two cores, once)"
    tree=$(mktemp -d)
    git -C "$ROOT" archive "$COMMIT" | tar -x -C "$tree"
    make -C "$tree" agent || status=$?
    if ((status == 0)); then
        install -D "$tree/target/agent/x86_64-unknown-linux-gnu/release/sandboxer-agent" "$1.new"
        mv "$1.new" "$1"
    fi
    rm -rf "$tree"
    ((status == 0)) || die "could not build the agent of $COMMIT"
}

key=$({
    echo "$COMMIT"
    rustc --version
    env | grep '^CARGO_PROFILE_RELEASE_' | sort
    sha256sum <"${BASH_SOURCE[0]}"
} | sha256sum | cut -c1-16)
agent=$CACHE/agent-before/$key/sandboxer-agent
with_lock "$CACHE/agent-before/.lock-$key" build "$agent" >&2
printf '%s\n' "$agent"
