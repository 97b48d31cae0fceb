#!/usr/bin/env bash
# `make demo`: starts a stack in target/demo, runs the CLI's demo on it, removes everything, and checks that nothing
# is left, also if the demo fails or is interrupted.
# usage: demo.sh check                 says in one line why no demo is possible here; before minutes of building
#        demo.sh [OPTION…]             options of `sandboxer-cli demo`
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
DIR=$ROOT/target/demo
REPORT=$ROOT/target/demo-report
# What a first build takes, with what it downloads, MiB: 2,600 in the clone, 3,400 in the home directory, a margin.
NEEDED_MIB=7000
# The same once all is built: images and memory files of a stack.
NEEDED_BUILT_MIB=1500

# Two demos would end each other's stack. The lock is this process's, and ends with it.
only_one() {
    mkdir -p "$ROOT/target"
    exec 8>>"$ROOT/target/.demo.lock"
    flock -n 8 || die "another demo runs in this clone: wait for its end, or use another clone"
}

check() {
    local free needed=$NEEDED_MIB
    [[ $(id -u) == 0 ]] || die "a demo needs root (mounts, namespaces, control groups): sudo make demo"
    only_one
    [[ ! -d $DIR || -e $DIR/.stack || -z $(ls -A "$DIR") ]] || die "$DIR exists and is no stack: move it away"
    [[ ! -x $ROOT/target/quick/sandboxer || ! -f $ROOT/target/guest/vmlinux ]] || needed=$NEEDED_BUILT_MIB
    free=$(df --output=avail -m "$ROOT/target" | tail -n 1)
    ((free >= needed)) || die "$ROOT/target has $((free)) MiB free, a demo needs $needed: free some"
    mkdir -p "$CACHE"
    free=$(df --output=avail -m "$CACHE" | tail -n 1)
    ((free >= needed / 2)) || die "$CACHE has $((free)) MiB free, a demo needs $((needed / 2)): free some, or set SANDBOXER_CACHE"
}

finish() {
    local status=$?
    # A second Ctrl-C must not end the removal.
    trap '' INT TERM HUP
    trap - EXIT
    "$ROOT/scripts/stack.sh" down "$DIR" || status=1
    "$ROOT/scripts/leftovers.sh" check "$DIR" "$before" || status=1
    rm -f "$before"
    say "$([[ $status == 0 ]] && echo "done" || echo "failed") after $((SECONDS - started)) s"
    exit $status
}

if [[ ${1:-} == check ]]; then
    check
    exit
fi
started=$SECONDS
only_one
# Leftovers of an earlier demo that was killed must not affect this comparison.
"$ROOT/scripts/stack.sh" down "$DIR" 2>/dev/null
before=$(mktemp)
"$ROOT/scripts/leftovers.sh" record "$DIR" "$before"
trap finish EXIT
trap 'exit 130' INT TERM HUP

rm -rf "$REPORT"
"$ROOT/scripts/stack.sh" up "$DIR" 8>&-
# shellcheck disable=SC1091
. "$DIR/env"
attended sandboxer-cli demo --kill-daemon --output "$REPORT" "$@" 8>&-
