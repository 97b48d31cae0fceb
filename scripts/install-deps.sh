#!/usr/bin/env bash
# Installs the missing Debian packages for building and running.
# usage: install-deps.sh [--check]     --check: only print what is missing (exit 1 if anything is)
# SANDBOXER_DEPS=demo: only what `make demo` and `make up` need, less than half of the packages.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

packages=(
    # the workspace: C linker, protobuf compiler with its well-known types, libseccomp for the guest agent
    gcc libc6-dev make pkg-config protobuf-compiler libprotobuf-dev libseccomp-dev git ca-certificates
    # the guest kernel
    linux-source-6.1 bc bison flex libelf-dev perl xz-utils cpio
    # a pod: its VMM, its root file system
    qemu-system-x86 erofs-utils e2fsprogs
    # the list of the guest image's parts
    jq
    # the stack to play with: an image, a pod network
    busybox-static containernetworking-plugins iproute2 util-linux mount procps
)
others=(
    # another processor, for make check-arm64
    gcc-aarch64-linux-gnu libc6-dev-arm64-cross
    # libFuzzer, for make fuzz
    g++
    # make lint
    shellcheck
    # the package, and its check
    dpkg-dev lintian
    # docker's packet filter
    iptables
    # the chart's tests
    curl python3-yaml openssl dash
    # the node VM: its root and its initrd
    mmdebstrap kmod
    # the emulator of the node VM
    ninja-build meson python3 libglib2.0-dev libpixman-1-dev zlib1g-dev libfdt-dev libattr1-dev libcap-ng-dev
)
[[ ${SANDBOXER_DEPS:-} == demo ]] || packages+=("${others[@]}")

command -v dpkg-query >/dev/null || die "this is not a Debian system: install the equivalents of: ${packages[*]}"

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
    [[ $status == installed ]] || missing+=("$package")
done

toolchains=()
command -v cargo >/dev/null || toolchains+=("cargo (Rust 1.90 or newer: https://rustup.rs)")
command -v go >/dev/null || toolchains+=("go (1.25 or newer: https://go.dev/dl)")
for toolchain in "${toolchains[@]}"; do say "not found: $toolchain"; done

if ((${#missing[@]})); then
    if [[ ${1:-} == --check ]]; then
        say "missing packages: ${missing[*]}"
        exit 1
    fi
    [[ $(id -u) == 0 ]] || die "as root, run: apt-get update && apt-get install --no-install-recommends ${missing[*]}"
    say "installing ${missing[*]}"
    # Without --error-on an unreachable mirror is only a warning, and the packages are then not found.
    apt-get update -qq --error-on=any ||
        die "cannot read the package lists (apt's reason is above): give this host a Debian mirror, or install by other means: ${missing[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2 ||
        die "cannot install the packages (apt's reason is above): mend that, then run this again"
fi
((${#toolchains[@]} == 0)) || die "install the toolchains named above, then run this again"
