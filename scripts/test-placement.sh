#!/usr/bin/env bash
# Runs the cases about NUMA nodes in a node VM that has two, with real containerd and QEMU on KVM, and prints where pods' memory was.
# usage: test-placement.sh [E2E]     E2E: the end-to-end program, if it is built and in the node's payload already
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
e2e=${1:-}
if [[ -z $e2e ]]; then
    e2e=$(cargo test --quiet --no-run --message-format=json -p sandboxer-e2e --test e2e |
        sed -n 's|.*"executable":"\([^"]*/deps/e2e-[0-9a-f]*\)".*|\1|p')
    [[ -n $e2e ]] || die "cargo named no test program"
    scripts/node.sh build "$e2e"
fi
log=$ROOT/target/test-placement.log

# A small pool: the node's memory is for pods. One case at a time.
scripts/node.sh run --cpus 4 --memory 8192 --numa 2 --limit 1800 --stall 400 --out "$ROOT/target/test-placement" \
    --env STACK_VMM=qemu --env STACK_ACCELERATOR=kvm --env POOL=4 --env SANDBOXER_E2E_HANDLERS=sandboxer \
    --env SANDBOXER_E2E_ONLY=placement -- "$e2e" --test-threads 1 2>&1 | tee "$log"
# A node with one NUMA node would pass over all cases.
sed 's/\x1b\[[0-9;]*m//g; s/\r$//' "$log" | grep -q '^test result: ok\. 7 passed; 0 failed; 0 ignored' ||
    die "not all cases ran; the output is in $log"
