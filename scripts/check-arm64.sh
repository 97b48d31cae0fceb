#!/usr/bin/env bash
# Checks whether the workspace compiles for arm64: types only, nothing is linked but what is preloaded into VMMs. Nothing runs there yet.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
TARGET=aarch64-unknown-linux-gnu
LINKER=aarch64-linux-gnu-gcc

command -v $LINKER >/dev/null || die "no $LINKER: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
if [[ ! -d $(rustc --print sysroot)/lib/rustlib/$TARGET/lib ]]; then
    timeout 300 rustup target add $TARGET >&2 || die "no standard library of Rust for $TARGET: rustup target add $TARGET"
fi
# A target directory of its own, so that it does not rebuild the host's.
CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$LINKER \
    cargo check --workspace --target $TARGET --target-dir target/arm64
