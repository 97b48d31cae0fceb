#!/usr/bin/env bash
# In a node VM: `check` finds KVM usable, a daemon with "auto" selects it, and a pod starts on it.
set -euo pipefail
dir=/tmp/stack
check=$(sandboxer-cli check --json) || true
kvm=$(grep -A 2 '"name": "kvm"' <<<"$check")
printf '%s\n' "$kvm"
grep -q '"verdict": "ok"' <<<"$kvm" || { echo "FAILED: check reports this KVM as not usable" >&2; exit 1; }
POOL=1 scripts/stack.sh up "$dir"
# shellcheck source=/dev/null
. "$dir/env"
version=$(sandboxer-cli version --json)
printf '%s\n' "$version"
grep -q '"accelerator": "kvm"' <<<"$version" || { echo "FAILED: the daemon did not choose KVM" >&2; exit 1; }
sandboxer-cli startup --runtime sandboxer --serial 1 --parallel 0 --output /tmp/startup
scripts/stack.sh down "$dir"
