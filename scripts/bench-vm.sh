#!/usr/bin/env bash
# Makes the disk of the series `vm` of `sandboxer-cli startup` and `sandboxer-bench workload`, from Debian packages alone, and prints its path: a whole
# Debian with systemd as init, and the tools of bench-small. Its directory has:
#   disk.raw      ext4 without a partition table; the unit bench.service runs the command that a second disk names
#   vmlinuz       Debian's kernel; QEMU's -kernel passes it to the firmware, so there is no boot loader
#   initrd        loads the modules for the disk and mounts it
#   packages      packages and versions
# It is cached by the hash of this file, of bench-image.sh and of the helper. The first call fetches some 100 MB and takes minutes. The
# helper is taken as it was built last (`make bench-helper`).
# usage: bench-vm.sh [HELPER]
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

SUITE=bookworm
# With the shell and its tools, which every Debian has.
SYSTEM=(systemd systemd-sysv udev kmod iproute2 dash coreutils)
# What Debian's kernel has as modules and the VM's devices need, in the order in which the initrd loads them.
MODULES=(virtio_pci virtio_blk virtio_console virtio_net crc32c_generic ext4)
# Room for the packages, the trees and the disk, while all are there.
NEEDED_MIB=3072
# Free space of the guest's root, MiB.
FREE_MIB=512

check_host() {
    local tool free
    [[ $(id -u) == 0 ]] || die "making the disk needs root (it unpacks owners and modes)"
    for tool in mmdebstrap:mmdebstrap mkfs.ext4:e2fsprogs depmod:kmod cpio:cpio gzip:gzip; do
        command -v "${tool%:*}" >/dev/null || die "no ${tool%:*}: apt-get install ${tool#*:}"
    done
    free=$(df --output=avail -m "$CACHE" | tail -n 1)
    ((free >= NEEDED_MIB)) || die "$CACHE has $free MiB free, the disk needs $NEEDED_MIB while it is made: free some, or set SANDBOXER_CACHE"
}

# unpack_system DIR: systemd and what it depends on; no maintainer script is run.
unpack_system() {
    debian_sources deb "$SUITE" >"$work/sources.list"
    # shellcheck disable=SC2016 # for the shell of the hook
    TMPDIR=$work attended mmdebstrap --quiet --variant=extract --mode=root --format=directory \
        --aptopt='Apt::Install-Recommends "false"' \
        --extract-hook='ls "$1/var/cache/apt/archives" | sed -n "s/\.deb$//p" >"$1/packages"' \
        --include="$(IFS=,; printf '%s' "${SYSTEM[*]}")" "$SUITE" "$1" "$work/sources.list" >"$work/log" 2>&1
}

# unpack_kernel DIR: the kernel that Debian's linux-image-amd64 depends on.
unpack_kernel() {
    local image
    image=$(apt-cache show "linux-image-amd64/$SUITE" "linux-image-amd64/$SUITE-security" 2>/dev/null | sed -n 's/^Depends: .*\(linux-image-[^ ,]*\).*/\1/p' | sort -V | tail -n 1)
    [[ -n $image ]] || die "apt knows no linux-image-amd64 of $SUITE: run 'apt-get update' on Debian 12"
    mkdir -p "$1"
    # As root, apt would download as its own user, who cannot write there.
    (cd "$1" && apt-get -qq -o APT::Sandbox::User=root download "$image" && basename -s .deb ./*.deb >packages && dpkg-deb -x ./*.deb . && rm ./*.deb)
}

# merge_usr ROOT: what Debian's package usrmerge does; unpacked packages still have files below /bin, /sbin and /lib.
merge_usr() {
    local root=$1 name
    for name in bin sbin lib lib64; do
        [[ -d $root/$name && ! -L $root/$name ]] || continue
        mkdir -p "$root/usr/$name"
        cp -a "$root/$name/." "$root/usr/$name/"
        rm -rf "${root:?}/$name"
        ln -s "usr/$name" "$root/$name"
    done
}

# copy_modules KERNEL ROOT: the modules of MODULES, and what they need.
copy_modules() {
    local from=$1 root=$2 version name path
    version=$(basename "$from"/lib/modules/*)
    depmod -b "$from" "$version"
    mkdir -p "$root/usr/lib/modules/$version"
    for name in "${MODULES[@]}"; do
        modprobe -d "$from" -S "$version" --show-depends "$name" | awk '$1 == "insmod" { print $2 }'
    done | awk '!seen[$0]++' >"$work/modules"
    while read -r path; do
        install -D -m 0644 "$path" "$root/usr/lib/modules/$version/${path#"$from/lib/modules/$version/"}"
    done <"$work/modules"
    cp "$from/lib/modules/$version"/modules.{order,builtin,builtin.modinfo} "$root/usr/lib/modules/$version/"
    depmod -b "$root" "$version"
}

# make_initrd OUT: busybox, the modules in $work/modules, and the script that mounts the root.
make_initrd() {
    local out=$1 dir=$work/initrd busybox count=0 path
    busybox=$(debian_program busybox-static bin/busybox)
    mkdir -p "$dir"/{bin,dev,proc,sys,root}
    cp "$busybox" "$dir/bin/busybox"
    while read -r path; do
        count=$((count + 1))
        cp "$path" "$dir/$(printf '%02d-%s' $count "$(basename "$path")")"
    done <"$work/modules"
    cat >"$dir/init" <<'INIT'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t devtmpfs dev /dev
for module in /[0-9]*.ko*; do $b insmod "$module"; done
$b mount -t ext4 -o rw /dev/vda /root || { $b echo "initrd: cannot mount the root disk"; $b poweroff -f; }
$b mount -o move /dev /root/dev
exec $b switch_root /root /sbin/init
INIT
    chmod 0755 "$dir/init"
    (cd "$dir" && find . | cpio --quiet -H newc -o --owner=0:0) | gzip -1 >"$out"
}

# configure ROOT: what packages' maintainer scripts would have done, and the unit.
configure() {
    local root=$1 name user group
    [[ -e $root/bin/sh ]] || ln -s dash "$root/usr/bin/sh"
    # A first boot would set up everything anew each time.
    printf '%032d\n' 1 >"$root/etc/machine-id"
    printf 'vm\n' >"$root/etc/hostname"
    # As large as that of containers.
    printf 'tmpfs /dev/shm tmpfs mode=1777,nosuid,nodev,size=64m 0 0\n' >"$root/etc/fstab"
    name=900
    # Units and udev rules name them.
    for user in systemd-network systemd-resolve systemd-timesync systemd-journal messagebus; do
        printf '%s:x:%d:%d::/:/usr/sbin/nologin\n' "$user" $name $name >>"$root/etc/passwd"
        printf '%s:x:%d:\n' "$user" $name >>"$root/etc/group"
        name=$((name + 1))
    done
    for group in adm tty disk lp dialout cdrom tape audio video plugdev users input render sgx kvm kmem utmp floppy; do
        printf '%s:x:%d:\n' "$group" $name >>"$root/etc/group"
        name=$((name + 1))
    done
    mkdir -p "$root"/etc/systemd/{system,network}/ "$root/etc/systemd/system"/{multi-user.target.wants,sysinit.target.wants} "$root/var/log/journal"
    # The address that QEMU's user-mode network forwards ports to.
    printf '[Match]\nDriver=virtio_net\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n' >"$root/etc/systemd/network/10-vm.network"
    ln -s /usr/lib/systemd/system/systemd-networkd.service "$root/etc/systemd/system/multi-user.target.wants/systemd-networkd.service"
    ln -s /usr/lib/systemd/system/multi-user.target "$root/etc/systemd/system/default.target"
    cat >"$root/etc/systemd/system/bench.service" <<'UNIT'
[Unit]
Description=The command of the measurement
[Service]
ExecStart=/usr/bin/bench-helper guest
StandardOutput=journal+console
StandardError=journal+console
LimitMEMLOCK=infinity
LimitNOFILE=1048576
[Install]
WantedBy=multi-user.target
UNIT
    ln -s ../bench.service "$root/etc/systemd/system/multi-user.target.wants/bench.service"
}

build() {
    local dir=$1 helper=$2 started=$SECONDS size root
    check_host
    rm -rf --one-file-system "$CACHE/bench"/.vm.*
    work=$(mktemp -d "$CACHE/bench/.vm.XXXXXX")
    # shellcheck disable=SC2064 # the directory is known now
    trap "rm -rf --one-file-system '$work'" EXIT
    trap 'exit 130' INT TERM HUP
    say "making the disk of a VM from Debian packages (some minutes, once)"
    root=$work/root
    "$ROOT/scripts/bench-image.sh" bench-small "$helper" "$root" >/dev/null
    unpack_system "$work/system" || { tail -n 15 "$work/log" >&2; die "cannot unpack systemd: the last lines of mmdebstrap are above"; }
    find "$work/system/dev" -mindepth 1 -delete
    unpack_kernel "$work/kernel"
    mkdir "$work/result"
    sort -u "$root/packages" "$work/system/packages" "$work/kernel/packages" >"$work/result/packages"
    # The tools' tree has the same release: what both have is the same.
    rm -rf "$work/system"/{packages,tmp,etc/passwd,etc/group} "$work/system"/usr/share/{doc,man,locale,info} "$work/system"/var/{cache,lib}/{apt,dpkg}
    merge_usr "$root"
    merge_usr "$work/system"
    cp -a "$work/system/." "$root"
    copy_modules "$work/kernel" "$root"
    configure "$root"
    make_initrd "$work/result/initrd"
    cp "$work/kernel"/boot/vmlinuz-* "$work/result/vmlinuz"
    size=$(($(du -sm "$root" | cut -f1) + FREE_MIB))
    # Its identity and times are equal in each build, so that boots are.
    mkfs.ext4 -q -F -d "$root" -L root -U 5eed0000-0000-4000-8000-000000000000 -E no_copy_xattrs,root_owner=0:0 "$work/result/disk.raw" "${size}M" >"$work/log" 2>&1 || {
        tail -n 3 "$work/log" >&2
        die "cannot make the disk with mkfs.ext4: its last lines are above"
    }
    rm -rf --one-file-system "$CACHE/bench"/vm-*
    mv -T "$work/result" "$dir"
    rm -rf --one-file-system "$work"
    say "disk: $(wc -l <"$dir/packages") packages, $(du -sh "$dir" | cut -f1), after $((SECONDS - started)) s"
}

cached() {
    local key dir
    key=$(cat "${BASH_SOURCE[0]}" "$ROOT/scripts/bench-image.sh" "$helper" | sha256sum | cut -c1-16)
    dir=$CACHE/bench/vm-$key
    [[ -f $dir/disk.raw ]] || build "$dir" "$helper" >&2
    printf '%s\n' "$dir/disk.raw"
}

(($# <= 1)) || die "usage: bench-vm.sh [HELPER]"
helper=${1:-$ROOT/target/bench-helper/x86_64-unknown-linux-gnu/release/bench-helper}
[[ -x $helper ]] || die "no $helper: run 'make bench-helper' first"
mkdir -p "$CACHE/bench"
# Not the lock of the images: bench-image.sh takes that one.
with_lock "$CACHE/bench/.lock-vm" cached
