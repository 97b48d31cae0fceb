#!/usr/bin/env bash
# Makes the parts of a node VM that do not depend on this project, from Debian packages alone, and prints their directory:
#   root.erofs                 a minimal Debian with what a node needs: QEMU, CNI plugins, erofs-utils …
#   vmlinuz-V, initrd-V        the kernel of Debian's stable release and the one of its backports (V: stable, backports)
# They are cached by the hash of this file. The first call takes some minutes, the next one none.
# usage: image.sh [key]          key: print the cache key only
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/../lib.sh"

SUITE=bookworm
# kmod and busybox-static make the initrd; the rest is what a node has installed before sandboxer comes to it.
PACKAGES=(
    qemu-system-x86 containernetworking-plugins erofs-utils e2fsprogs iproute2 iptables kmod busybox-static procps
    systemd util-linux mount cpio socat strace libseccomp2 ca-certificates perl-base netbase
)
# What Debian's kernels have as modules and a node, its disks or this project use. A kernel that has one built in, or has
# it no more, is fine.
MODULES=(
    virtio_pci virtio_blk virtio_console virtio_net virtio_rng 9p 9pnet_virtio ext4 erofs overlay loop dm_mod dm_thin_pool
    kvm-amd vhost_vsock vhost_net vsock vmw_vsock_virtio_transport tun tap bridge br_netfilter veth dummy macvtap af_packet
    sch_ingress cls_matchall cls_u32 cls_flower cls_bpf act_mirred act_bpf act_gact sch_tbf
    ip_tables iptable_filter iptable_nat nf_nat nf_tables nft_compat xt_comment xt_MASQUERADE xt_multiport xt_mark
    fuse nbd crc32c_generic binfmt_misc
    xfrm_user xfrm_algo
)
# Of these, what finds the root disk.
EARLY=(virtio_pci virtio_blk virtio_console erofs overlay)
# Room for the packages, the tree and the image, while all three are there.
NEEDED_MIB=3072

# Debian's sources, and its backports from the same mirror.
sources() {
    local lines
    lines=$(debian_sources deb "$SUITE")
    printf '%s\n' "$lines"
    sed -n "s/ $SUITE main\$/ $SUITE-backports main/p" <<<"$lines"
}

key() { sha256sum <"${BASH_SOURCE[0]}" | cut -c1-16; }

check_host() {
    local tool free
    [[ $(id -u) == 0 ]] || die "making the node's root needs root (it unpacks device files and owners)"
    for tool in mmdebstrap:mmdebstrap mkfs.erofs:erofs-utils depmod:kmod cpio:cpio; do
        command -v "${tool%:*}" >/dev/null || die "no ${tool%:*}: apt-get install ${tool#*:}"
    done
    free=$(df --output=avail -m "$CACHE" | tail -n 1)
    ((free >= NEEDED_MIB)) || die "$CACHE has $free MiB free, the node's image needs $NEEDED_MIB while it is made: free some, or set SANDBOXER_CACHE"
}

# kernel NAME PACKAGE TREE: unpacks the kernel that PACKAGE depends on into TREE.
# Run by mmdebstrap, whose package lists are used.
fetch_kernel() {
    local release=$1 dir=$2 image
    mkdir -p "$dir"
    image=$(APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-cache show "linux-image-amd64/$release" | sed -n 's/^Depends: .*\(linux-image-[^ ,]*\).*/\1/p' | head -n 1)
    [[ -n $image ]] || die "no linux-image-amd64 in $release"
    (cd "$dir" && APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get download -qq "$image/$release" && dpkg -x ./*.deb . && rm ./*.deb)
}

# modules KERNEL ROOT: the wanted modules of the unpacked kernel, and what they need, into ROOT.
copy_modules() {
    local from=$1 root=$2 version name path
    version=$(basename "$from"/lib/modules/*)
    depmod -b "$from" "$version"
    mkdir -p "$root/usr/lib/modules/$version"
    for name in "${MODULES[@]}"; do
        modprobe -d "$from" -S "$version" --show-depends "$name" 2>/dev/null | awk '$1 == "insmod" { print $2 }' || true
    done | sort -u | while read -r path; do
        install -D -m 0644 "$path" "$root/usr/lib/modules/$version/${path#"$from/lib/modules/$version/"}"
    done
    cp "$from/lib/modules/$version"/modules.{order,builtin,builtin.modinfo} "$root/usr/lib/modules/$version/"
    # A merged /usr: what looks below /lib finds it there.
    depmod -b "$root/usr" "$version" 2>/dev/null || depmod -b "$root" "$version"
}

# initrd KERNEL ROOT OUT: busybox, the early modules in the order in which they load, and the script that mounts the root.
make_initrd() {
    local from=$1 root=$2 out=$3 version dir count=0 name path
    version=$(basename "$from"/lib/modules/*)
    dir=$(mktemp -d)
    mkdir -p "$dir"/{bin,dev,proc,mnt,root,payload,rw}
    cp "$root/usr/bin/busybox" "$dir/bin/busybox" 2>/dev/null || cp "$root/bin/busybox" "$dir/bin/busybox"
    for name in "${EARLY[@]}"; do
        modprobe -d "$from" -S "$version" --show-depends "$name" 2>/dev/null | awk '$1 == "insmod" { print $2 }' || true
    done | awk '!seen[$0]++' >"$dir/list"
    while read -r path; do
        count=$((count + 1))
        cp "$path" "$dir/$(printf '%02d-%s' $count "$(basename "$path")")"
    done <"$dir/list"
    rm "$dir/list"
    cat >"$dir/init" <<'INIT'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t devtmpfs dev /dev
for module in /[0-9]*.ko*; do $b insmod "$module"; done
$b mount -t erofs -o ro /dev/vda /root && $b mount -t tmpfs -o mode=0755 rw /rw && $b mkdir /rw/upper /rw/work &&
    $b mount -t overlay -o lowerdir=/root,upperdir=/rw/upper,workdir=/rw/work root /mnt || { $b echo "node: cannot mount the root disk"; $b poweroff -f; }
$b mkdir -p /mnt/payload
$b mount -t erofs -o ro /dev/vdb /mnt/payload || { $b echo "node: cannot mount the payload"; $b poweroff -f; }
$b umount -l /dev
exec $b switch_root /mnt /payload/init
INIT
    chmod 0755 "$dir/init"
    (cd "$dir" && find . | cpio --quiet -H newc -o --owner=0:0) >"$out"
    rm -rf "$dir"
}

build() {
    local dir=$1 work release started=$SECONDS
    mkdir -p "$CACHE/node"
    check_host
    rm -rf "$CACHE/node"/.partial.*
    work=$(mktemp -d "$CACHE/node/.partial.XXXXXX")
    # shellcheck disable=SC2064 # the directory is known now
    trap "rm -rf --one-file-system '$work'" EXIT
    trap 'exit 130' INT TERM HUP
    say "making the node's root from Debian packages (some minutes, once)"
    sources >"$work/sources.list"
    # Nothing of it must survive a power cut before it is whole, so dpkg need not wait for the disk.
    if ! TMPDIR=$work mmdebstrap --quiet --variant=minbase --mode=root --format=directory \
        --aptopt='Apt::Install-Recommends "false"' --dpkgopt='force-unsafe-io' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/info/*' \
        --include="$(IFS=,; printf '%s' "${PACKAGES[*]}")" \
        --customize-hook="MMDEBSTRAP_APT_CONFIG=\$MMDEBSTRAP_APT_CONFIG '$ROOT/scripts/node/image.sh' kernels '$work'" \
        "$SUITE" "$work/root" "$work/sources.list" >"$work/log" 2>&1; then
        tail -n 15 "$work/log" >&2
        die "cannot make the node's root: the last lines of mmdebstrap are above"
    fi
    mkdir "$work/result"
    for release in stable backports; do
        copy_modules "$work/$release" "$work/root"
        make_initrd "$work/$release" "$work/root" "$work/result/initrd-$release"
        cp "$work/$release"/boot/vmlinuz-* "$work/result/vmlinuz-$release"
    done
    rm -rf "$work/root"/var/{cache,lib}/apt/* "$work/root"/boot/* "$work/root"/usr/share/{doc,man,locale,info}
    # Uncompressed: a processor that is emulated would spend more on unpacking than is saved by reading less.
    mkfs.erofs -Enoinline_data "$work/result/root.erofs" "$work/root" >>"$work/log" 2>&1 || die "mkfs.erofs failed on the node's root: $(tail -n 3 "$work/log")"
    mv -T "$work/result" "$dir"
    rm -rf --one-file-system "$work"
    say "node image: $(du -sh "$dir" | cut -f1) in $dir, after $((SECONDS - started)) s"
}

cached() {
    local dir
    dir=$CACHE/node/$(key)
    [[ -f $dir/root.erofs ]] || build "$dir" >&2
    printf '%s\n' "$dir"
}

case ${1:-} in
'') mkdir -p "$CACHE/node" && with_lock "$CACHE/node/.lock" cached ;;
key) key ;;
# Called by mmdebstrap, with the new root behind it.
kernels) fetch_kernel "$SUITE" "$2/stable" && fetch_kernel "$SUITE-backports" "$2/backports" ;;
*) die "usage: image.sh [key]" ;;
esac
