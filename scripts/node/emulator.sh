#!/usr/bin/env bash
# Builds the QEMU that emulates node VMs, from Debian's source package with one line added, and prints its path. Debian's own program
# sometimes delivers an interrupt twice to a guest of the node, which is then lost: docs/decisions/0009-node-vm.md says why.
# It is cached by the hash of this file. The first call takes some minutes, the next one none.
# usage: emulator.sh [built]       built: only print its path; exit code 1 if it is not built
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/../lib.sh"

SUITE=bookworm
# The devices of scripts/node.sh.
DEVICES=(Q35 VIRTIO_PCI VIRTIO_BLK VIRTIO_SERIAL VIRTIO_RNG VIRTIO_9P SERIAL_ISA)
FEATURES=(--enable-tcg --enable-fdt=system --enable-virtfs --enable-attr --enable-cap-ng)
# Where Debian's packages have the firmware.
FIRMWARE=/usr/share/qemu:/usr/share/seabios
# Space for source and objects, while both exist.
NEEDED_MIB=1536

check_host() {
    local tool free
    for tool in ninja:ninja-build meson:meson dpkg-source:dpkg-dev cc:gcc python3:python3; do
        command -v "${tool%:*}" >/dev/null || die "no ${tool%:*}: apt-get install ${tool#*:}"
    done
    free=$(df --output=avail -m "$CACHE" | tail -n 1)
    ((free >= NEEDED_MIB)) || die "$CACHE has $free MiB free, the emulator needs $NEEDED_MIB while it is built: free some, or set SANDBOXER_CACHE"
}

# fetch DIR: Debian's source package, from the mirrors that this host's apt uses, into DIR/qemu.
fetch() {
    local options=(-qq -o "Dir::Etc::SourceList=$1/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$1/lists"
        -o APT::Sandbox::User=root)
    mkdir -p "$1/lists/partial"
    debian_sources deb-src "$SUITE" >"$1/sources.list"
    apt-get "${options[@]}" update
    (cd "$1" && apt-get "${options[@]}" source --download-only qemu && dpkg-source --no-check -x ./qemu_*.dsc qemu)
}

# The interrupt that KVM injects is delivered when the guest is entered. Its vector must then not stay behind as a pending exception.
mend() {
    local file=$1/target/i386/tcg/sysemu/svm_helper.c call='do_interrupt_x86_hardirq(env, vector, 1);'
    [[ $(grep -cF "$call" "$file") == 1 ]] || die "this QEMU delivers injected interrupts in another way: $file"
    sed -i "s/^\( *\)$call\$/&\n\1cs->exception_index = -1;/" "$file"
    grep -qF 'cs->exception_index = -1;' "$file" || die "cannot add the line to $file"
}

compile() {
    printf 'CONFIG_%s=y\n' "${DEVICES[@]}" >"$1/qemu/configs/devices/x86_64-softmmu/node.mak"
    mkdir "$1/build"
    (cd "$1/build" && ../qemu/configure --target-list=x86_64-softmmu --without-default-features --without-default-devices \
        --with-devices-x86_64=node "${FEATURES[@]}" --disable-docs --disable-tools --disable-install-blobs --firmwarepath="$FIRMWARE" &&
        ninja qemu-system-x86_64)
    strip "$1/build/qemu-system-x86_64"
}

build() {
    local dir=$1 work began=$SECONDS
    mkdir -p "$CACHE/emulator"
    check_host
    rm -rf "$CACHE/emulator"/.partial.*
    work=$(mktemp -d "$CACHE/emulator/.partial.XXXXXX")
    # shellcheck disable=SC2064 # the directory is known now
    trap "rm -rf --one-file-system '$work'" EXIT
    trap 'exit 130' INT TERM HUP
    say "building the emulator of node VMs from Debian's QEMU (some minutes, once)"
    if ! { fetch "$work" && mend "$work/qemu" && compile "$work"; } >"$work/log" 2>&1; then
        tail -n 15 "$work/log" >&2
        die "cannot build the emulator: the last lines are above"
    fi
    mkdir -p "$dir"
    mv "$work/build/qemu-system-x86_64" "$dir/"
    rm -rf --one-file-system "$work"
    say "emulator: $(du -h "$dir/qemu-system-x86_64" | cut -f1) in $dir, after $((SECONDS - began)) s"
}

cached() { [[ -x $program ]] || build "${program%/*}" >&2; }

program=$CACHE/emulator/$(sha256sum <"$0" | cut -c1-16)/qemu-system-x86_64
case ${1:-} in
'') with_lock "$CACHE/emulator/.lock" cached ;;
built) [[ -x $program ]] || exit 1 ;;
*) die "usage: emulator.sh [built]" ;;
esac
printf '%s\n' "$program"
