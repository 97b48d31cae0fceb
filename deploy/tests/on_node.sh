#!/usr/bin/env bash
# Runs the installer as a privileged container of a node would: its own root, the node's root at /host, and in the node's PID
# namespace, whose first process has the node's root. The node is a directory, and its services are doubles (node-double/).
# usage: on_node.sh NODE IMAGE [NAME=VALUE…] -- COMMAND…
set -euo pipefail
node=$1 image=$2
shift 2
if [[ ${ON_NODE_INNER:-} != yes ]]; then
    ON_NODE_INNER=yes exec unshare --mount --pid --fork --kill-child --propagation private "$0" "$node" "$image" "$@"
fi
unset ON_NODE_INNER
settings=()
while [[ $1 != -- ]]; do settings+=("$1"); shift; done
shift

# The container: a mount namespace of its own. It starts when the node's is complete.
mount -t tmpfs tmpfs "$image/sys"
mkfifo "$image/sys/go"
unshare --mount --propagation private bash -c '
    set -euo pipefail
    node=$1 image=$2
    shift 2
    mount --bind "$node" "$image/host"
    mount -t proc proc "$image/proc"
    read -r <"$image/sys/go"
    exec chroot "$image" /bin/busybox env -i "$@"' container "$node" "$image" "${settings[@]}" "$@" &
container=$!

mount --bind "$node" "$node"
mount -t proc proc "$node/proc"
exec 3>"$image/sys/go"
cd "$node"
pivot_root . .
umount -l .
echo go >&3
exec 3>&-
status=0
wait "$container" || status=$?
exit "$status"
