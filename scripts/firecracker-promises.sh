#!/usr/bin/env bash
# Measures what Firecracker's specification promises, in a node VM and in virtual time: benches/firecracker.rs says how. Prints a table.
# usage: FIRECRACKER=/path/to/firecracker firecracker-promises.sh
# SANDBOXER_BENCH_STARTS is the number of starts of each VM (20).
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
[[ -x ${FIRECRACKER:-} ]] || die "set FIRECRACKER to its program, Debian has none"
# The measured times do not depend on how the bench itself is compiled: it waits.
bench=$(cargo build --quiet --message-format=json -p sandboxer-vmm --bench firecracker |
    sed -n 's|.*"executable":"\([^"]*/deps/firecracker-[0-9a-f]*\)".*|\1|p')
[[ -n $bench ]] || die "cargo named no program of the bench"
scripts/node/emulator.sh >/dev/null
scripts/node.sh build "$bench"
attended scripts/node.sh run --virtual-time --memory 4096 --limit 1800 --stall 120 \
    --env SANDBOXER_BENCH_STARTS="${SANDBOXER_BENCH_STARTS:-20}" -- "$bench"
