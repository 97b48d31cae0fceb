#!/usr/bin/env bash
# Runs a Kubernetes node on a stack: etcd, API server and kubelet, in a network namespace of their own. Pods name the node.
#   kubernetes.sh up DIR       starts what is not running: the stack in DIR, and the node `node1` on it
#   kubernetes.sh down DIR     stops and removes all of it, in any state; also if there is nothing
#   kubernetes.sh status DIR   prints what runs; exit 1 unless everything does
# DIR/bin/kubectl talks to it, from any network namespace; RUN/api.sock is its API without TLS and tokens (RUN: see DIR/env).
# There is no scheduler, and of the controllers those of Deployments: a pod has `nodeName: node1`. RuntimeClasses: sandboxer and runc.
# One at a time: kubelet has files and sysctls that a host has once. The variables of stack.sh hold here, too. KUBERNETES_VERSION (default: see tools.sh) is Kubernetes' version.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

usage() { sed -n '3,5s/^# *//p' "$0" >&2; exit 2; }
[[ $# == 2 ]] || usage
stack_names "$2"
NETNS=$RUN/netns
VETH=sbxk-$HASH
NODE_IP=203.0.113.1
PARTS=(etcd kube-apiserver kubectl-proxy kube-controller-manager kubelet)
# What kubelet uses whatever its configuration says, and what it changes on the host.
HOST_DIRS=(/var/lib/kubelet /var/log/containers /var/log/pods /usr/libexec/kubernetes /etc/kubernetes)
SYSCTLS=(vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops kernel.keys.root_maxkeys kernel.keys.root_maxbytes)

inside() { nsenter --net="$NETNS" "$@"; }
# Prints what is in HOST_DIRS.
host_files() { find "${HOST_DIRS[@]}" -depth 2>/dev/null | sort -u || true; }

# --- up ----------------------------------------------------------------------------------------------------

network() {
    if ! mountpoint -q "$NETNS"; then
        : >"$NETNS"
        unshare --net="$NETNS" ip link set lo up
    fi
    inside test ! -e /proc/sys/net/ipv4/conf/eth0 || return 0
    ip link add "$VETH" type veth peer name eth0 netns "$NETNS"
    ip link set "$VETH" up
    inside ip addr add "$NODE_IP/24" dev eth0
    inside ip link set eth0 up
    inside ip route add default dev eth0
    inside sysctl -qw net.ipv4.ip_forward=1
}

# The host's state before kubelet changes it: written once, whole.
note_host() {
    local name
    [[ ! -e $K/host-files ]] || return 0
    for name in "${SYSCTLS[@]}"; do
        printf '%s=%s\n' "$name" "$(sysctl -n "$name")"
    done >"$K/sysctls"
    host_files >"$K/host-files.new"
    mv "$K/host-files.new" "$K/host-files"
}

# kubelet wants its root in every hierarchy; a group of cpuset has no processors until it gets some.
cgroup_root() {
    local hierarchy
    for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*/; do
        [[ -e ${hierarchy%/}/cgroup.procs ]] || continue
        mkdir -p "${hierarchy%/}$CGROUP"
        for file in cpuset.cpus cpuset.mems; do
            [[ ! -e ${hierarchy%/}/$file || -e ${hierarchy%/}/cgroup.controllers ]] || cat "${hierarchy%/}/$file" >"${hierarchy%/}$CGROUP/$file"
        done
    done
}

configure_kubernetes() {
    local token
    [[ ! -e $K/kubelet.yaml ]] || return 0
    token=$(openssl rand -hex 16)
    openssl genrsa -out "$K/service-accounts.key" 2048 2>/dev/null
    printf '%s,admin,admin,system:masters\n' "$token" >"$K/tokens"
    cat >"$K/kubeconfig" <<END
apiVersion: v1
kind: Config
clusters: [{name: node, cluster: {server: "https://127.0.0.1:6443", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: "$token"}}]
contexts: [{name: node, context: {cluster: node, user: admin}}]
current-context: node
END
    printf 'nameserver 192.0.2.1\n' >"$K/resolv.conf"
    printf '#!/bin/sh\nexec nsenter --net="%s" "%s/kubectl" --kubeconfig="%s" --cache-dir="%s" "$@"\n' \
        "$NETNS" "$TOOLS" "$K/kubeconfig" "$K/cache" >"$K/kubectl"
    chmod 0755 "$K/kubectl"
    # Short periods, so that a test need not wait; no eviction for the host's disk, which may be nearly full.
    cat >"$K/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://$RUN/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: $CGROUP
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
enforceNodeAllocatable: [pods]
evictionHard: {memory.available: 50Mi}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
podLogsDir: $K/logs
staticPodPath: $K/static-pods
fileCheckFrequency: 2s
volumePluginDir: $K/plugins
resolvConf: $K/resolv.conf
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
readOnlyPort: 10255
syncFrequency: 5s
containerLogMaxSize: 100Ki
containerLogMonitorInterval: 3s
makeIPTablesUtilChains: false
nodeStatusUpdateFrequency: 5s
housekeepingInterval: 5s
volumeStatsAggPeriod: 5s
shutdownGracePeriod: 0s
registerNode: true
END
}

# A part that does not tell when it is ready.
spawn() {
    local name=$1 pid
    shift
    setsid "$@" </dev/null >>"$DIR/$name/log" 2>&1 9>&- &
    pid=$!
    printf '%s %s\n' "$pid" "$(stat_field "$pid" 22)" >"$DIR/pids/$name"
}

# FILE exists when it is ready.
spawn_until() {
    local file=$1 name=$2 try
    shift 2
    ! running "$name" >/dev/null || return 0
    rm -f "$file"
    spawn "$name" "$@"
    for try in {1..300}; do
        [[ ! -e $file ]] || return 0
        running "$name" >/dev/null || break
        sleep 0.1
    done
    die "$name was not ready after $((try / 10)) s: see $DIR/$name/log"
}

control_plane() {
    start etcd nsenter --net="$NETNS" "$ETCD" --name node --data-dir "$K/etcd" --unsafe-no-fsync --log-level warn \
        --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
        --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
        --initial-cluster node=http://127.0.0.1:2380
    start kube-apiserver nsenter --net="$NETNS" "$TOOLS/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 \
        --secure-port=6443 --bind-address=127.0.0.1 --advertise-address="$NODE_IP" --cert-dir="$K/apiserver" \
        --token-auth-file="$K/tokens" --authorization-mode=AlwaysAllow --anonymous-auth=false \
        --service-account-issuer=https://node.invalid --service-account-key-file="$K/service-accounts.key" \
        --service-account-signing-key-file="$K/service-accounts.key" --service-cluster-ip-range=198.51.100.0/24 \
        --disable-admission-plugins=ServiceAccount --allow-privileged=true --endpoint-reconciler-type=none \
        --kubelet-preferred-address-types=InternalIP
    running kube-controller-manager >/dev/null || spawn kube-controller-manager nsenter --net="$NETNS" \
        "$CONTROLLERS/kube-controller-manager" --kubeconfig="$K/kubeconfig" --leader-elect=false --secure-port=0 \
        --controllers=deployment-controller,replicaset-controller
    spawn_until "$RUN/api.sock" kubectl-proxy "$K/kubectl" proxy --unix-socket="$RUN/api.sock" --reject-paths='^$'
}

# The overhead is what a busy emulated guest needs beyond its pod's limits: docs/measuring.md, "Memory".
objects() {
    "$K/kubectl" apply --server-side -f - >/dev/null <<END
apiVersion: v1
kind: ServiceAccount
metadata: {name: default, namespace: default}
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: sandboxer}
handler: sandboxer${STACK_SUFFIX:-}
overhead: {podFixed: {memory: 192Mi}}
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: runc}
handler: runc
END
}

up() {
    local try other
    [[ $(id -u) == 0 ]] || die "a node needs root: it mounts, makes namespaces and cgroups"
    other=$(other_node)
    [[ -z $other ]] || die "there is a node in $other, and a host has one /var/lib/kubelet and one set of sysctls: 'kubernetes.sh down $other' first"
    TOOLS=$("$ROOT/scripts/tools.sh" kubernetes)
    CONTROLLERS=$("$ROOT/scripts/tools.sh" controllers)
    ETCD=$(debian_program etcd-server usr/bin/etcd)
    mkdir -p "$RUN"
    network
    # A guest that does not answer is noticed as soon as on a node with the default configuration.
    STACK_NETWORK=here STACK_AGENT_TIMEOUT=${STACK_AGENT_TIMEOUT:-10} inside "$ROOT/scripts/stack.sh" up "$DIR"
    exec 9<"$DIR"
    flock 9
    K=$DIR/kubernetes
    mkdir -p "$K"/{etcd,logs,root,plugins,cache,static-pods} "${PARTS[@]/#/$DIR/}"
    chmod 0700 "$K/etcd"
    ln -sfn "$K/kubectl" "$DIR/bin/kubectl"
    note_host
    cgroup_root
    configure_kubernetes
    control_plane
    objects
    start kubelet env PATH="$DIR/bin:$PATH" nsenter --net="$NETNS" "$TOOLS/kubelet" --config="$K/kubelet.yaml" --kubeconfig="$K/kubeconfig" \
        --root-dir="$K/root" --cert-dir="$K/kubelet-certs" --node-ip="$NODE_IP" --hostname-override=node1 \
        --containerd="$RUN/containerd.sock"
    for try in {1..300}; do
        if [[ $("$K/kubectl" get node node1 -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}' 2>/dev/null) == True ]]; then
            say "up: $DIR/bin/kubectl; source $DIR/env"
            return
        fi
        sleep 0.2
    done
    die "node1 is not Ready after $((try / 5)) s: see $DIR/kubelet/log"
}

# --- down --------------------------------------------------------------------------------------------------

restore_host() {
    local file
    while read -r file; do sysctl -qw "$file" || say "cannot restore sysctl $file"; done <"$K/sysctls"
    # Children come before their directory only in the order of find -depth.
    find "${HOST_DIRS[@]}" -depth 2>/dev/null | grep -vxFf "$K/host-files" | while read -r file; do
        rm -df "$file" 2>/dev/null || say "cannot remove $file"
    done || true
}

down() {
    local name pid
    [[ $(id -u) == 0 ]] || die "removing a node needs root"
    K=$DIR/kubernetes
    if [[ -e $DIR/.stack ]]; then
        for name in kubelet kube-controller-manager kubectl-proxy kube-apiserver etcd; do
            pid=$(running "$name") || continue
            end_pid "$pid" 10
        done
        [[ ! -e $K/host-files ]] || restore_host
    fi
    "$ROOT/scripts/stack.sh" down "$DIR"
    ip link del "$VETH" 2>/dev/null || true
}

status() {
    local name pid all=0
    "$ROOT/scripts/stack.sh" status "$DIR" || all=1
    for name in "${PARTS[@]}"; do
        if pid=$(running "$name"); then
            echo "$name: running, pid $pid, log $DIR/$name/log"
        else
            echo "$name: not running"
            all=1
        fi
    done
    return $all
}

case $1 in
up) up ;;
down) down ;;
status) status ;;
*) usage ;;
esac
