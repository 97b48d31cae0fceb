#!/usr/bin/env bash
# Makes images as OCI archives, from what Debian has: no registry is asked. The stack's own two, or one of a directory.
# usage: oci-image.sh busybox|pause NAME OUT.tar
#        oci-image.sh tree|owned NAME OUT.tar DIRECTORY [VOLUME…]
# The same input gives the same bytes: times, owners and order are fixed. With `owned`, files keep their owners.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
[[ $# == 3 || (${1-} =~ ^(tree|owned)$ && $# -ge 4) ]] || die "usage: oci-image.sh busybox|pause NAME OUT.tar, or tree|owned NAME OUT.tar DIRECTORY [VOLUME…]"
kind=$1 name=$2 out=$(realpath -m "$3") rootfs=
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/layout/blobs/sha256" "$(dirname "$out")"

owners=(--owner=0 --group=0)
archive() { tar -C "$1" --sort=name --mtime=@0 "${owners[@]}" --numeric-owner --format=posix \
    --pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime -cf "$2" .; }
size() { stat -c %s "$1"; }
# blob FILE: moves it into the layout under its digest, prints the digest's hex.
blob() {
    local hex
    hex=$(sha256sum "$1" | cut -d' ' -f1)
    mv "$1" "$work/layout/blobs/sha256/$hex"
    printf '%s' "$hex"
}

busybox_rootfs() {
    local root=$1 busybox applet
    busybox=$(command -v busybox) || die "no busybox: apt-get install busybox-static"
    ! ldd "$busybox" >/dev/null 2>&1 || die "$busybox is not static: apt-get install busybox-static"
    mkdir -p "$root"/{bin,sbin,usr/bin,usr/sbin,etc,dev,proc,sys,home,root,tmp,var/tmp,var/spool/mail,var/www}
    chmod 0700 "$root/root"
    chmod 1777 "$root/tmp" "$root/var/tmp"
    install -m 0755 "$busybox" "$root/bin/busybox"
    while read -r applet; do
        [[ $applet == bin/busybox ]] || ln -sf /bin/busybox "$root/$applet"
    done < <("$busybox" --list-full)
    printf '%s\n' 'root:x:0:0:root:/root:/bin/sh' 'daemon:x:1:1:daemon:/usr/sbin:/bin/false' \
        'mail:x:8:8:mail:/var/spool/mail:/bin/false' 'www-data:x:33:33:www-data:/var/www:/bin/false' \
        'nobody:x:65534:65534:nobody:/home:/bin/false' >"$root/etc/passwd"
    printf '%s\n' 'root:x:0:' 'daemon:x:1:' 'tty:x:5:' 'mail:x:8:' 'www-data:x:33:' 'nogroup:x:65534:' \
        >"$root/etc/group"
    config='"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],"Cmd":["sh"]'
}

pause_rootfs() {
    gcc -Os -s -static -o "$1/pause" "$ROOT/scripts/pause.c"
    config='"Entrypoint":["/pause"],"User":"65535:65535"'
}

case $kind in
busybox | pause)
    rootfs=$work/rootfs
    mkdir "$rootfs"
    "${kind}_rootfs" "$rootfs"
    ;;
tree | owned)
    rootfs=$4
    config='"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]'
    volumes=("${@:5}")
    if ((${#volumes[@]} > 0)); then
        config+=$(printf ',"%s":{}' "${volumes[@]}" | sed 's/^,/,"Volumes":{/; s/$/}/')
    fi
    ;;
*) die "no image of kind '$kind': busybox, pause, tree or owned" ;;
esac

[[ $kind != owned ]] || owners=()
archive "$rootfs" "$work/layer"
owners=(--owner=0 --group=0)
layer_size=$(size "$work/layer")
layer=$(blob "$work/layer")
printf '{"architecture":"amd64","os":"linux","config":{%s},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]},"history":[{"created_by":"scripts/oci-image.sh %s"}]}' \
    "$config" "$layer" "$kind" >"$work/config"
config_size=$(size "$work/config")
config_hex=$(blob "$work/config")
printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:%s","size":%s},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"sha256:%s","size":%s}]}' \
    "$config_hex" "$config_size" "$layer" "$layer_size" >"$work/manifest"
manifest_size=$(size "$work/manifest")
manifest=$(blob "$work/manifest")
printf '{"imageLayoutVersion":"1.0.0"}' >"$work/layout/oci-layout"
printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:%s","size":%s,"annotations":{"io.containerd.image.name":"%s"},"platform":{"architecture":"amd64","os":"linux"}}]}' \
    "$manifest" "$manifest_size" "$name" >"$work/layout/index.json"
archive "$work/layout" "$out.partial"
mv "$out.partial" "$out"
