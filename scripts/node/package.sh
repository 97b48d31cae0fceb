#!/usr/bin/env bash
# In a node VM: makes it a Debian host with dpkg's database, containerd and a pod network, and runs the package's test under systemd.
# usage: package.sh TEST PACKAGE LATER BENCH
set -euo pipefail
[[ $# == 4 && -d /node/ctl ]] || { echo "usage, in a node VM: package.sh TEST PACKAGE LATER BENCH" >&2; exit 2; }

# The node has a tmpfs over /var/lib; apt and dpkg need what the root has there.
mkdir /tmp/root
mount --bind / /tmp/root
cp -a /tmp/root/var/lib/. /var/lib/
umount /tmp/root
rmdir /tmp/root
mkdir -p /var/lib/apt/lists/partial /var/cache/apt/archives/partial
# The node's root was made without documents; a user's host has them.
rm -f /etc/dpkg/dpkg.cfg.d/*

install -m 0755 "$SANDBOXER_CACHE"/tools/containerd-*/bin/{containerd,ctr} /usr/local/bin/
# As on a host where somebody fetches by hand.
ln -s "$(command -v busybox)" /usr/local/bin/wget
mkdir -p /etc/containerd/conf.d /etc/cni/net.d /opt/cni
ln -s /usr/lib/cni /opt/cni/bin
cat >/etc/systemd/system/containerd.service <<'UNIT'
[Unit]
Description=containerd
[Service]
Type=notify
ExecStart=/usr/local/bin/containerd
Environment=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
Delegate=yes
KillMode=process
LimitNOFILE=1048576
UNIT
cat >/etc/cni/net.d/10-bridge.conflist <<'NETWORK'
{ "cniVersion": "0.4.0", "name": "bridge", "plugins": [ { "type": "bridge", "bridge": "cni0", "isGateway": true,
  "ipam": { "type": "host-local", "ranges": [[{ "subnet": "192.0.2.0/24" }]], "routes": [{ "dst": "0.0.0.0/0" }] } } ] }
NETWORK
# Programs of the clone must not stand in for those of the package.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
SANDBOXER_E2E_PACKAGES=$2:$3:$4 scripts/node/systemd.sh "$1" --nocapture
