#!/usr/bin/env bash
# Packs the installer of the chart as an OCI archive, from the results of `make build guest-image`, and prints its path. No registry
# is asked: the image has what `make install` yields, the installer, and of Debian busybox, curl and curl's libraries.
# usage: installer-image.sh [NAME [OUT.tar]]      default: sandboxer-installer:VERSION, target/installer/sandboxer-installer.tar
#        installer-image.sh --tree DIRECTORY      only the image's files, into a new directory
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
umask 022
export LC_ALL=C

version() { sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml; }

check_host() {
    [[ -x target/release/sandboxer-cli && -f target/guest/vmlinux ]] ||
        die "the programs or the guest image are missing: run 'make build guest-image' first"
    command -v curl >/dev/null || die "no curl: apt-get install curl"
    busybox=$(command -v busybox) || die "no busybox: apt-get install busybox-static"
    ! ldd "$busybox" >/dev/null 2>&1 || die "$busybox is not static: apt-get install busybox-static"
}

# payload ROOT: what goes to the node.
payload() {
    local installed=$work/installed to=$1/payload
    make -s install DESTDIR="$installed"
    mkdir -p "$to/share"
    cp -a "$installed/usr/bin" "$to/bin"
    cp -a "$installed/usr/lib/sandboxer" "$to/lib"
    cp -a "$installed/usr/lib/systemd/system/sandboxer.service" "$to/"
    cp -a LICENSE "$to/share/"
    cp -a target/guest/sbom.cdx.json "$to/share/guest.cdx.json"
}

# with_libraries PROGRAM ROOT: copies it into ROOT, and the libraries that it is linked with, to where its loader looks for them.
with_libraries() {
    local file
    install -D "$1" "$2/bin/${1##*/}"
    ldd "$1" | sed -n 's|.* => \(/[^ ]*\) .*|\1|p; s|^\t\(/[^ ]*\) (0x.*|\1|p' | while read -r file; do
        install -D -m 0755 "$(realpath "$file")" "$2$file"
    done
}

tree() {
    local root=$1 applet
    mkdir -p "$root"/{bin,etc,tmp,proc,sys,dev,host,files,var/run}
    chmod 1777 "$root/tmp"
    install -m 0755 "$busybox" "$root/bin/busybox"
    for applet in $("$busybox" --list); do
        [[ $applet == busybox ]] || ln -sf busybox "$root/bin/$applet"
    done
    with_libraries "$(command -v curl)" "$root"
    install -m 0755 deploy/installer/installer "$root/installer"
    payload "$root"
}

check_host
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [[ ${1:-} == --tree ]]; then
    [[ $# == 2 && ! -e $2 ]] || die "usage: installer-image.sh --tree DIRECTORY, which does not exist yet"
    tree "$2"
    exit
fi
name=${1:-sandboxer-installer:$(version)}
out=$(realpath -m "${2:-target/installer/sandboxer-installer.tar}")
tree "$work/root"
scripts/oci-image.sh tree "$name" "$out" "$work/root"
say "$name: $(du -h "$out" | cut -f 1), sha256 $(sha256sum "$out" | cut -d ' ' -f 1)"
printf '%s\n' "$out"
