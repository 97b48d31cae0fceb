# Shared by the scripts beside it: source it, don't run it.
# shellcheck shell=bash

# The root of this clone.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

# What is dear to build (guest kernel, containerd) is kept outside the tree, so that `make clean`
# and a second clone don't pay for it again.
CACHE=${SANDBOXER_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/sandboxer}

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "$*"; exit 1; }

# with_lock FILE COMMAND…: one at a time per FILE, for everybody who uses the same cache.
with_lock() {
    local lock=$1
    shift
    mkdir -p "$(dirname "$lock")"
    (
        flock 9
        "$@"
    ) 9>"$lock"
}
