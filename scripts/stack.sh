#!/usr/bin/env bash
# Runs a separate containerd and sandboxer daemon, all in DIR, beside everything else on the host.
#   stack.sh up DIR [--no-daemon]   starts what is not running; writes DIR/env (to `source`)
#   stack.sh down DIR               stops and removes all of it, in any state; also if there is nothing
#   stack.sh load DIR IMAGE…        loads images of workloads (bench-small, bench-build): see bench-image.sh
#   stack.sh status DIR             prints what runs; exit 1 unless everything does
# Our programs come from SANDBOXER_BIN_DIR (default target/$SANDBOXER_PROFILE, else target/release), the guest image from SANDBOXER_GUEST_DIR (default
# target/guest). POOL (default 8) is the number of VMs that wait for pods; 0: no pool.
# POOL_MAX (default POOL) is the most of all sizes together: more than POOL leaves room for pods of other sizes.
# STACK_VMM and STACK_ACCELERATOR are [vm] vmm and accelerator of the daemon (default auto). STACK_MEMORY is a pod's memory (256 MiB),
# STACK_AGENT_TIMEOUT [vm] agent_timeout (60 s), STACK_VHOST_NET [vm] vhost_net (auto).
# CONTAINERD_VERSION (default: see tools.sh) is containerd's version.
# STACK_GVISOR=1 adds the handler gvisor (runsc with its own shim, built once, some minutes).
# STACK_NRI=1: containerd listens for plugins of NRI, at RUN/nri.sock (containerd 2 only).
# STACK_NETWORK=here: the bridge of the pods is in the caller's network namespace, not in a separate one, and pods have IPv4 only.
# STACK_HANDLERS names a file with further runtime handlers, as in containerd 2's configuration, that is added to the stack's once.
# STACK_QEMU is [vm] qemu of the daemon.
# STACK_SUFFIX is appended to the names of the handlers, so that results of two VMMs can be merged.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

usage() { sed -n '3,6s/^# *//p' "$0" >&2; exit 2; }
[[ $# -ge 2 ]] || usage
verb=$1
stack_names "$2"
daemon=yes
case $verb:${3:-} in
load:?*) ;;
load:) usage ;;
up:--no-daemon) daemon=no ;;
*:) ;;
*) usage ;;
esac

BUSYBOX=docker.io/library/busybox:latest
PAUSE=registry.k8s.io/pause:3.10.2

# --- up ----------------------------------------------------------------------------------------------------

fill() {
    local restrict=false
    # CAP_SYS_RESOURCE is bit 24.
    (($(awk '/^CapEff/ { print "0x" $2 }' /proc/self/status) >> 24 & 1)) || restrict=true
    sed -e "s|@DIR@|$DIR|g; s|@RUN@|$RUN|g; s|@PAUSE@|$PAUSE|g; s|@RESTRICT_OOM@|$restrict|g; s|@CGROUP@|$CGROUP|g" \
        -e "s|@NETWORK@|$NETWORK|g; s|@POOL@|${POOL:-8}|g; s|@POOL_MAX@|${POOL_MAX:-${POOL:-8}}|g; s|@GUEST@|${SANDBOXER_GUEST_DIR:-$ROOT/target/guest}|g" \
        -e "s|@VMM@|${STACK_VMM:-auto}|g; s|@ACCELERATOR@|${STACK_ACCELERATOR:-auto}|g; s|@SUFFIX@|${STACK_SUFFIX:-}|g" \
        -e "s|@QEMU@|${STACK_QEMU:+qemu = \"$STACK_QEMU\"}|g" \
        -e "s|@VHOST_NET@|${STACK_VHOST_NET:-auto}|g" \
        -e "s|@NO_NRI@|$([[ ${STACK_NRI:-} == 1 ]] && echo false || echo true)|g" \
        -e "s|@MEMORY@|${STACK_MEMORY:-256}|g; s|@AGENT_TIMEOUT@|${STACK_AGENT_TIMEOUT:-60}|g" "$1"
}

# with_handlers COMMAND…: runs it; then adds the caller's handlers to a configuration of containerd that it wrote.
with_handlers() {
    local file=$DIR/containerd/config.toml new=no
    [[ -e $file ]] || new=yes
    "$@"
    [[ -n ${STACK_HANDLERS:-} && $new == yes ]] || return 0
    [[ -r $STACK_HANDLERS ]] || die "STACK_HANDLERS=$STACK_HANDLERS cannot be read"
    cat "$STACK_HANDLERS" >>"$file"
}

# configure TEMPLATE FILE: writes FILE once; later edits stay.
configure() {
    [[ -e $DIR/$2 ]] || fill "$ROOT/vmm-configs/$1" >"$DIR/$2"
}

# Writes containerd's configuration, in the form that its version reads.
configure_containerd() {
    local version
    version=$("$DIR/bin/containerd" --version | awk '{ sub(/^v/, "", $3); print $3 }')
    case $version in
    1.*) configure containerd/stack-1.toml.in containerd/config.toml ;;
    2.[0-2].*)
        configure containerd/stack.toml.in containerd/config.toml
        # The names of these keys before 2.3.
        sed -i 's/^\[plugins\."io\.containerd\.server\.v1\.\(grpc\|ttrpc\)"\]/[\1]/' "$DIR/containerd/config.toml"
        [[ $version != 2.0.* ]] || sed -i 's/^  bin_dirs = \["\(.*\)"\]/  bin_dir = "\1"/' "$DIR/containerd/config.toml"
        ;;
    2.3.0)
        configure containerd/stack.toml.in containerd/config.toml
        unpack_without_erofs "$DIR/containerd/config.toml"
        ;;
    *) configure containerd/stack.toml.in containerd/config.toml ;;
    esac
}

# By default 2.3.0 also unpacks with mkfs.erofs, of a version that Debian 12 does not have, and without it has no CRI at all.
unpack_without_erofs() {
    ! grep -q unpack_config "$1" || return 0
    printf '\n[[plugins."io.containerd.transfer.v1.local".unpack_config]]\n  %s\n  %s\n  %s\n' \
        "platform = \"linux/$(dpkg --print-architecture)\"" 'snapshotter = "overlayfs"' 'differ = "walking"' >>"$1"
}

# with_gvisor COMMAND…: runs it; then adds gVisor's handler to a configuration of containerd that it wrote, if that is wanted.
with_gvisor() {
    local file=$DIR/containerd/config.toml new=no
    [[ -e $file ]] || new=yes
    "$@"
    [[ ${STACK_GVISOR:-} == 1 ]] || return 0
    [[ $new == yes || $(<"$file") == *'runtimes.gvisor]'* ]] || die "$file has no handler gvisor: 'stack.sh down $DIR' first, or add it"
    configure containerd/runsc.toml.in containerd/runsc.toml
    [[ $new == no ]] || fill "$ROOT/vmm-configs/containerd/gvisor.toml.in" >>"$file"
}

link_binaries() {
    local from file
    mkdir -p "$DIR/bin"
    # shellcheck disable=SC2046 # nothing, or one word
    for from in $("$ROOT/scripts/tools.sh" containerd runc $([[ ${STACK_GVISOR:-} != 1 ]] || echo gvisor)); do
        for file in "$from"/*; do ln -sfn "$file" "$DIR/bin/${file##*/}"; done
    done
    [[ $daemon == yes ]] || return 0
    from=${SANDBOXER_BIN_DIR:-$ROOT/target/${SANDBOXER_PROFILE:-release}}
    for file in sandboxer sandboxer-front sandboxer-cli sandboxer-share containerd-shim-sandboxer-v1; do
        [[ -x $from/$file ]] || die "no $from/$file: run 'make build' first"
        ln -sfn "$(realpath "$from/$file")" "$DIR/bin/$file"
    done
    # By the name that CRI-O takes.
    ln -sfn containerd-shim-sandboxer-v1 "$DIR/bin/containerd-shim-sandboxer-v2"
    # Only measurements need it.
    [[ ! -x $from/sandboxer-bench ]] || ln -sfn "$(realpath "$from/sandboxer-bench")" "$DIR/bin/sandboxer-bench"
}

# Pods get an interface on a bridge in a separate network namespace: it is visible neither on the host, nor in its
# /etc/cni, nor to another stack. Only the CNI plugin enters the namespace, so containerd's streaming server
# (exec -it, attach) stays reachable at 127.0.0.1.
pod_network() {
    local plugins=${CNI_BIN_DIR:-/usr/lib/cni}
    [[ -x $plugins/bridge && -x $plugins/host-local && -x $plugins/loopback ]] ||
        die "no CNI plugins in $plugins: apt-get install containernetworking-plugins"
    mkdir -p "$DIR"/cni/{bin,net.d,two.d}
    ln -sfn "$plugins/host-local" "$DIR/cni/bin/host-local"
    # containerd 1.x runs it for every pod.
    ln -sfn "$plugins/loopback" "$DIR/cni/bin/loopback"
    if [[ ${STACK_NETWORK:-} == here ]]; then
        ln -sfn "$plugins/bridge" "$DIR/cni/bin/bridge"
        ln -sfn "$plugins/portmap" "$DIR/cni/bin/portmap"
        fill "$ROOT/vmm-configs/containerd/node-network.conflist.in" >"$DIR/cni/net.d/10-$NETWORK.conflist"
    else
        if ! mountpoint -q "$DIR/cni/netns"; then
            : >"$DIR/cni/netns"
            unshare --net="$DIR/cni/netns" ip link set lo up
        fi
        # A new file: the old one may be a link to the host's plugin.
        printf '#!/bin/sh\nexec nsenter --net="%s" "%s" "$@"\n' "$DIR/cni/netns" "$plugins/bridge" >"$DIR/cni/bin/bridge.new"
        chmod 0755 "$DIR/cni/bin/bridge.new"
        mv -T "$DIR/cni/bin/bridge.new" "$DIR/cni/bin/bridge"
        fill "$ROOT/vmm-configs/containerd/pod-network.conflist.in" >"$DIR/cni/net.d/10-$NETWORK.conflist"
    fi
    # Pods of the handlers `…-two` have both networks.
    cp "$DIR/cni/net.d/10-$NETWORK.conflist" "$DIR/cni/two.d/"
    fill "$ROOT/vmm-configs/containerd/second-network.conflist.in" >"$DIR/cni/two.d/20-$NETWORK.conflist"
}

# The file that the blockfile snapshotter copies for each image.
scratch_file() {
    local file=$DIR/images/scratch.ext4
    [[ ! -e $file ]] || return 0
    truncate -s 32M "$file.new"
    mkfs.ext4 -q -F "$file.new"
    mv "$file.new" "$file"
}

import_images() {
    local have kind name said image ctr=("$DIR/bin/ctr" -a "$RUN/containerd.sock" -n k8s.io)
    have=$("${ctr[@]}" images ls -q 2>/dev/null) ||
        die "containerd does not list its images: did all its plugins start? See $DIR/containerd/log"
    for kind in busybox pause; do
        [[ $kind == busybox ]] && name=$BUSYBOX || name=$PAUSE
        ! grep -qxF "$name" <<<"$have" || continue
        image=$DIR/images/$kind.tar
        # A node VM has them in its payload, since it compiles nothing.
        if [[ -f $CACHE/images/$kind.tar ]]; then
            ln -sfn "$CACHE/images/$kind.tar" "$image"
        else
            "$ROOT/scripts/oci-image.sh" "$kind" "$name" "$image"
        fi
        # Printed only if it fails: ctr repeats containerd's deprecation warnings at each call.
        said=$("${ctr[@]}" images import "$image" 2>&1) || die "cannot import $name: $said"
    done
}

# load IMAGE…: loads it even if it exists, since its helper may have changed.
load() {
    local kind archive said
    running containerd >/dev/null || die "no containerd runs in $DIR: 'stack.sh up $DIR' starts one"
    for kind in "$@"; do
        archive=$("$ROOT/scripts/bench-image.sh" "$kind")
        said=$("$DIR/bin/ctr" -a "$RUN/containerd.sock" -n k8s.io images import "$archive" 2>&1) ||
            die "cannot import $kind: $said"
        say "loaded localhost/sandboxer/$kind:latest"
    done
}

write_env() {
    printf '%s: unix://%s\n' runtime-endpoint "$RUN/containerd.sock" image-endpoint "$RUN/containerd.sock" \
        >"$DIR/crictl.yaml"
    cat >"$DIR/env" <<END
# source this file: crictl, ctr and sandboxer-cli then use the stack in $DIR
export CONTAINER_RUNTIME_ENDPOINT=unix://$RUN/containerd.sock
export IMAGE_SERVICE_ENDPOINT=unix://$RUN/containerd.sock
export CRI_CONFIG_FILE=$DIR/crictl.yaml
export CONTAINERD_ADDRESS=$RUN/containerd.sock
export CONTAINERD_NAMESPACE=k8s.io
export SANDBOXER_SOCKET=$RUN/sandboxer/admin.sock
export SANDBOXER_CONFIG=$DIR/sandboxer/config.toml
export SANDBOXER_CGROUP_PARENT=$CGROUP
export PATH="$DIR/bin:\$PATH"
END
}

up() {
    [[ $(id -u) == 0 ]] || die "a stack needs root: it mounts, makes namespaces and cgroups"
    [[ ! $DIR =~ [[:space:]|\"\&,] ]] || die "$DIR: a stack's path must not contain white space, comma, quote, | or &"
    if [[ -d $DIR && ! -e $DIR/.stack && -n $(ls -A "$DIR") ]]; then
        die "$DIR is not empty and not a stack: name another directory"
    fi
    mkdir -p "$DIR"/{containerd/tmp,sandboxer/state,pids,images} "$RUN"/{s,sandboxer}
    chmod 0711 "$RUN"
    : >"$DIR/.stack"
    printf '%s\n' "$DIR" >"$RUN/dir"
    exec 9<"$DIR"
    flock 9
    ln -sfn "$RUN/sandboxer" "$DIR/sandboxer/run"
    ln -sfn "$RUN/containerd.sock" "$DIR/containerd/containerd.sock"
    ln -sfn "$RUN/containerd.sock.ttrpc" "$DIR/containerd/containerd.sock.ttrpc"
    link_binaries
    pod_network
    scratch_file
    with_handlers with_gvisor configure_containerd
    export PATH="$DIR/bin:$PATH"
    if [[ $daemon == yes ]]; then
        # Before containerd, which at its restart asks the daemon about its pods.
        configure stack.toml.in sandboxer/config.toml
        start sandboxer "$DIR/bin/sandboxer" --config "$DIR/sandboxer/config.toml"
    fi
    start containerd "$DIR/bin/containerd" --config "$DIR/containerd/config.toml"
    import_images
    write_env
    say "up: source $DIR/env"
}

# --- down --------------------------------------------------------------------------------------------------

# Removes pods and containers through containerd, if it runs. `down` kills the rest.
remove_pods() {
    local ctr=("$DIR/bin/ctr" -a "$RUN/containerd.sock" --connect-timeout 5s -n k8s.io) id
    running containerd >/dev/null || return 0
    for id in $(timeout 10 "${ctr[@]}" tasks ls -q 2>/dev/null); do
        timeout 10 "${ctr[@]}" tasks kill -s KILL "$id" >/dev/null 2>&1 || true
    done
    for id in $(timeout 10 "${ctr[@]}" sandboxes ls 2>/dev/null | awk 'NR > 1 { print $1 }'); do
        timeout 20 "${ctr[@]}" sandboxes rm --force "$id" >/dev/null 2>&1 || true
    done
}

# Prints the ids of all containers and pods that may have left cgroups, also outside our parent group.
container_ids() {
    local dir
    for dir in "$DIR"/containerd/{state/io.containerd.runtime.v2.task,runc}/*/*/; do
        [[ ! -d $dir ]] || basename "$dir"
    done | sort -u
}

cgroup_dirs() {
    local id names=(-path "*$CGROUP" -o -path "*$CGROUP/*" -o -path "*$CGROUP-idle" -o -path "*$CGROUP-idle/*")
    for id in "$@"; do names+=(-o -name "$id" -o -path "*/$id/*"); done
    find /sys/fs/cgroup -depth -type d \( "${names[@]}" \) 2>/dev/null || true
}

remove_cgroups() {
    local dirs dir try
    for try in {1..40}; do
        dirs=$(cgroup_dirs "$@")
        [[ -n $dirs ]] || break
        for dir in $dirs; do
            xargs -r kill -KILL <"$dir/cgroup.procs" 2>/dev/null || true
            rmdir "$dir" 2>/dev/null || true
        done
        # The kernel does not report when the last process has left a v1 cgroup.
        ((try == 1)) || sleep 0.05
    done
    [[ -z $dirs ]] || say "cannot remove cgroups: $dirs"
    # containerd's default parent; this fails, as it should, while the group is in use.
    find /sys/fs/cgroup -maxdepth 2 -type d -name k8s.io -exec rmdir {} + 2>/dev/null || true
}

unmount_all() {
    local target
    awk -v a="$DIR/" -v b="$RUN/" 'index($5, a) == 1 || index($5, b) == 1 { print $5 }' /proc/self/mountinfo | tac |
        while read -r target; do
            target=$(printf '%b' "${target//\\/\\0}")
            umount "$target" 2>/dev/null || umount --lazy "$target" 2>/dev/null || say "cannot unmount $target"
        done
    for target in /sys/block/loop*/loop/backing_file; do
        [[ -r $target && $(cat "$target") == "$DIR"/* ]] || continue
        target=${target#/sys/block/}
        losetup -d "/dev/${target%%/*}" || true
    done
}

down() {
    local pid ids
    if [[ ! -e $DIR/.stack ]]; then
        [[ ! -e $RUN ]] || rm -rf --one-file-system "$RUN"
        say "no stack in $DIR"
        return 0
    fi
    [[ $(id -u) == 0 ]] || die "removing a stack needs root"
    exec 9<"$DIR"
    flock 9
    remove_pods
    for name in containerd sandboxer; do
        pid=$(running "$name") || continue
        end_pid "$pid" 10
    done
    owned_pids | xargs -r kill -KILL 2>/dev/null || true
    mapfile -t ids < <(container_ids)
    remove_cgroups "${ids[@]}"
    # Unmount before removing: a mount may contain files of others.
    unmount_all
    rm -rf /var/lib/cni/results/"$NETWORK"-*
    rmdir /var/lib/cni/results /var/lib/cni 2>/dev/null || true
    rm -rf --one-file-system "$RUN" "$DIR"
    say "down: $DIR removed"
}

# --- status ------------------------------------------------------------------------------------------------

status() {
    local name pid all=0
    for name in containerd sandboxer; do
        if pid=$(running "$name"); then
            echo "$name: running, pid $pid, log $DIR/$name/log"
        else
            echo "$name: not running"
            all=1
        fi
    done
    return $all
}

case $verb in
up) up ;;
load) load "${@:3}" ;;
down) down ;;
status) status ;;
*) usage ;;
esac
