#!/usr/bin/env bash
# Packs the files of this clone that a node VM needs into target/node/payload.erofs and prints its path: scripts, configurations,
# programs as far as they are built, guest image, and the named FILEs; also containerd, runc and the stack's images from the cache.
# usage: payload.sh [FILE…]       FILE: further files of the clone, such as test programs
# NODE_BENCH=1 adds what scripts/node/workload.sh needs: the images of workloads, their helper, and gVisor, unless STACK_GVISOR=0. STACK_GVISOR=1 adds gVisor to any.
# NODE_VM=1 adds the disk of the series `vm`. NODE_FILES=DIR adds a directory of this host, which is `files` in the node's cache.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/../lib.sh"

OUT=$ROOT/target/node
# Space for the tree and the image, with test programs, while both exist.
NEEDED_MIB=1536
PROGRAMS=(sandboxer sandboxer-front sandboxer-cli sandboxer-bench sandboxer-share containerd-shim-sandboxer-v1)
# The daemon with failpoints, if it was built after the other one.
FAILING=target/release/sandboxer-failing

check_host() {
    local tool free
    for tool in mkfs.erofs:erofs-utils cpio:cpio strip:binutils git:git; do
        command -v "${tool%:*}" >/dev/null || die "no ${tool%:*}: apt-get install ${tool#*:}"
    done
    free=$(($(df --output=avail -m "$OUT" | tail -n 1)))
    ((free >= NEEDED_MIB)) || die "$OUT has $free MiB free, the node's payload needs $NEEDED_MIB while it is made: free some"
}

# lay FILE…: copies files of the clone to their paths below DIR/clone. Programs are stripped.
lay() {
    local file at
    for file in "$@"; do
        [[ -e $file ]] || die "no $file: run 'make build guest-image' first"
        at=$work/clone/${file#"$ROOT"/}
        mkdir -p "${at%/*}"
        if [[ $(head -c 4 "$file" | tr -d '\0') == $'\x7fELF' && ${file##*/} != vmlinux ]]; then
            strip --strip-debug -o "$at" "$file"
            chmod 0755 "$at"
        else
            cp -a "$file" "$at"
        fi
    done
}

images() {
    mkdir -p "$work/cache/images"
    "$ROOT/scripts/oci-image.sh" busybox docker.io/library/busybox:latest "$work/cache/images/busybox.tar"
    "$ROOT/scripts/oci-image.sh" pause registry.k8s.io/pause:3.10.2 "$work/cache/images/pause.tar"
}

# The program in the images of workloads, and in VMs. Disks and images are found by its hash.
helper() {
    local helper=target/bench-helper/x86_64-unknown-linux-gnu/release
    mkdir -p "$work/clone/$helper" "$work/cache/bench"
    cp -a "$ROOT/$helper/bench-helper" "$work/clone/$helper/"
}

# vm: the disk of the series vm.
vm() {
    helper
    cp -a "$(dirname "$("$ROOT/scripts/bench-vm.sh")")" "$work/cache/bench/"
}

# bench: the archives of the workloads' images, and their trees for the series native.
bench() {
    local image archive
    helper
    for image in bench-small bench-build; do
        archive=$("$ROOT/scripts/bench-image.sh" "$image")
        # As it is: the archive's name has its hash.
        cp -a "$archive" "${archive%-*.tar}" "$work/cache/bench/"
    done
}

pack() {
    local program tool
    # All files that git does not ignore, including uncommitted changes.
    (cd "$ROOT" && git ls-files -z --cached --others --exclude-standard) |
        (cd "$ROOT" && xargs -0 -r ls -d 2>/dev/null | cpio --quiet -pdm "$work/clone")
    for program in "${PROGRAMS[@]}"; do
        [[ ! -f $ROOT/target/release/$program ]] || lay "$ROOT/target/release/$program"
    done
    [[ ! -f $ROOT/$FAILING || $ROOT/$FAILING -ot $ROOT/target/release/sandboxer ]] || lay "$ROOT/$FAILING"
    lay "$ROOT"/target/guest/{vmlinux,initramfs.cpio} "$@"
    # shellcheck disable=SC2046 # nothing, or one word
    for tool in $("$ROOT/scripts/tools.sh") $([[ ${STACK_GVISOR:-${NODE_BENCH:-0}} != 1 ]] || "$ROOT/scripts/tools.sh" gvisor); do
        mkdir -p "$work/cache/tools/$(basename "${tool%/bin}")"
        cp -a "$tool" "$work/cache/tools/$(basename "${tool%/bin}")/"
    done
    images
    [[ ${NODE_BENCH:-} != 1 ]] || bench
    [[ ${NODE_VM:-} != 1 ]] || vm
    [[ -z ${NODE_FILES:-} ]] || { mkdir -p "$work/cache/files" && cp -aL "$NODE_FILES/." "$work/cache/files/"; }
    install -m 0755 "$ROOT/scripts/node/init" "$work/init"
    rm -f "$OUT/payload.erofs"
    mkfs.erofs -Enoinline_data "$work.erofs" "$work" >"$work.log" 2>&1 || die "cannot make the payload with mkfs.erofs: $(tail -n 3 "$work.log")"
    mv "$work.erofs" "$OUT/payload.erofs"
}

mkdir -p "$OUT"
check_host
work=$(mktemp -d "$OUT/.payload.XXXXXX")
trap 'rm -rf "$work" "$work.log" "$work.erofs"' EXIT
trap 'exit 130' INT TERM HUP
mkdir "$work/clone"
pack "$@"
say "payload: $(du -h "$OUT/payload.erofs" | cut -f1)"
printf '%s\n' "$OUT/payload.erofs"
