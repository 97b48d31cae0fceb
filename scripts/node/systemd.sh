#!/usr/bin/env bash
# In a node VM: runs a command under a separate systemd, which is process 1 there.
# usage: systemd.sh COMMAND…
set -euo pipefail
[[ -x /lib/systemd/systemd ]] || { echo "systemd.sh: the node has no systemd" >&2; exit 1; }

# Without a machine id, systemd makes one and logs this at each boot.
printf '%032x\n' 1 >/etc/machine-id
# This unit would clear the node's files in /tmp.
for unit in systemd-tmpfiles-setup systemd-tmpfiles-setup-dev systemd-tmpfiles-clean; do
    ln -sfn /dev/null "/etc/systemd/system/$unit.service"
done
# Without udev, units that wait for devices wait forever. In a container systemd knows that there is no udev.
unshare --pid --mount --fork --kill-child --propagation shared --mount-proc \
    env -i container=node PATH="$PATH" /lib/systemd/systemd --unit=basic.target --log-target=null --show-status=no &
unshared=$!
trap 'kill -KILL $unshared 2>/dev/null || true' EXIT
for _ in {1..600}; do
    first=$(pgrep -P "$unshared" || true)
    [[ -z $first ]] || inside=(nsenter --target "$first" --mount --pid --)
    if [[ -n $first ]] && "${inside[@]}" systemctl is-system-running 2>/dev/null | grep -qE '^(running|degraded|starting)$' &&
        "${inside[@]}" systemctl is-active -q basic.target; then
        up=yes
        break
    fi
    sleep 0.1
done
[[ ${up:-} == yes ]] || { echo "systemd.sh: systemd has not reached basic.target within a minute" >&2; exit 1; }
SANDBOXER_E2E_SYSTEMD=1 "${inside[@]}" "$@"
