#!/usr/bin/env bash
# Measures Kata Containers beside sandboxer and runc on a usable KVM, in node VMs and virtual time: start-up one after the other, with and
# without a network, groups at once, and memory. Nothing of Kata is in this project: KATA_DIR has its files. docs/compare-kata.md
# says what they must be, what is equal on both sides, and what was measured so.
# usage: KATA_DIR=DIR bench-kata.sh [--check] [PART…]
#   serial   one after the other: pool, template, boot, Kata, runc
#   host     the same with --network host
#   groups   KATA_GROUP (8) at once
#   memory   PSS at KATA_COUNTS (1,5,10) pods
# (default: all). A part that fails is named at the end, and the others go on. Existing results in target/bench-kata/runs are kept;
# `--fresh` removes them first. --check only looks at KATA_DIR.
# KATA_SERIAL (10) starts each, KATA_ROUNDS (3) groups, KATA_MEMORY (8192, MiB of each node), KATA_LIMIT (7200, seconds of each node),
# KATA_TIMEOUT (120, seconds of a start) change the plan. STACK_GVISOR=1 measures gVisor, too.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=scripts/node/parts.sh
. "$(dirname "$0")/node/parts.sh"
cd "$ROOT"
OUT=$ROOT/target/bench-kata
RUNS=$OUT/runs
CLI=$ROOT/target/release/sandboxer-cli
# The pods of both sides.
MIB=256
failed=()

# What KATA_DIR must have, and what each is.
FILES=(
    'containerd-shim-kata-v2:the shim'
    'virtiofsd:the file server'
    'vmlinux:the guest kernel'
    'configuration.toml:the shim'"'"'s configuration, as its build generated it'
)
# The keys of the configuration that are set here.
KEYS=(path kernel default_memory virtio_fs_daemon)

# check: names all that is missing in KATA_DIR, in one line.
check() {
    local file key missing=()
    [[ -n ${KATA_DIR:-} ]] || die "KATA_DIR is not set: the directory with Kata's files (docs/compare-kata.md says which)"
    [[ -d $KATA_DIR ]] || die "KATA_DIR=$KATA_DIR is no directory"
    for file in "${FILES[@]}"; do
        [[ -s $KATA_DIR/${file%%:*} ]] || missing+=("${file%%:*} (${file#*:})")
    done
    [[ -s $KATA_DIR/kata.img || -s $KATA_DIR/kata.initrd ]] || missing+=('kata.img or kata.initrd (the guest root)')
    ((${#missing[@]} == 0)) || die "KATA_DIR=$KATA_DIR lacks $(join "${missing[@]}")"
    for file in containerd-shim-kata-v2 virtiofsd; do
        [[ -x $KATA_DIR/$file ]] || missing+=("$file")
    done
    ((${#missing[@]} == 0)) || die "not executable in KATA_DIR=$KATA_DIR: $(join "${missing[@]}")"
    for file in configuration.toml $([[ ! -e $KATA_DIR/containerd-shim-kata-v2-rs ]] || echo configuration-rs.toml); do
        [[ -s $KATA_DIR/$file ]] || die "KATA_DIR=$KATA_DIR has a Rust shim and no $file (its configuration)"
        grep -q '^\[hypervisor\.qemu\]' "$KATA_DIR/$file" ||
            die "$KATA_DIR/$file has no table [hypervisor.qemu]: it is of another version or hypervisor"
        for key in "${KEYS[@]}"; do
            grep -qE "^ *$key *=" "$KATA_DIR/$file" || missing+=("$key")
        done
        ((${#missing[@]} == 0)) || die "$KATA_DIR/$file does not set $(join "${missing[@]}"): it is of another version"
    done
    head -c 4 "$KATA_DIR/vmlinux" | grep -q ELF || die "$KATA_DIR/vmlinux is no uncompressed kernel (ELF)"
}

join() {
    local all
    printf -v all '%s, ' "$@"
    printf '%s' "${all%, }"
}

# version: prints what the shim says of itself; it must not hang.
version() {
    local said
    said=$(timeout -k 1 5 "$KATA_DIR/containerd-shim-kata-v2" --version 2>&1 </dev/null | head -n 1 | tr -d '\r') || true
    printf '%s' "${said:-a shim that says no version within 5 s}"
}

# The handlers that are measured, Kata's last.
handlers() {
    printf '%s\n' sandboxer sandboxer-template sandboxer-boot kata
    [[ ! -e $KATA_DIR/containerd-shim-kata-v2-rs ]] || echo kata-rs
    [[ ${STACK_GVISOR:-} != 1 ]] || echo gvisor
    echo runc
}

# options OPTION…: sets the options of a node in `options`, with these ones.
options() {
    options=(--memory "${KATA_MEMORY:-8192}" --limit "${KATA_LIMIT:-7200}" --env STACK_VMM=qemu --env STACK_QEMU=qemu-system-x86_64
        --env STACK_MEMORY="$MIB" --env NODE_PREPARE=scripts/node/kata.sh --env START_TIMEOUT="${KATA_TIMEOUT:-120}"
        --env STACK_GVISOR="${STACK_GVISOR:-0}" "$@")
}

# starts NAME POOL PARTS SERIAL GROUP ARGUMENTS [--env …]
starts() {
    local name=$1 pool=$2 parts=$3 serial=$4 group=$5 arguments=$6 all
    shift 6
    mapfile -t all < <(handlers)
    options --env POOL="$pool" --env BENCH_ARGUMENTS="--baseline kata $arguments" "$@"
    stall=900 in_parts "$RUNS" "$name" "$parts" "$serial" "$group" "${all[@]}" -- "${options[@]}"
}

serial() { starts serial 2 "$(((${KATA_SERIAL:-10} + 1) / 2))" 2 0 ''; }
host() { starts host 2 "$(((${KATA_SERIAL:-10} + 1) / 2))" 2 0 '--network host'; }
groups() { starts groups "${KATA_GROUP:-8}" "${KATA_ROUNDS:-3}" 0 "${KATA_GROUP:-8}" '' --env PAUSE=60; }
memory() {
    local all=(sandboxer kata) status=0
    [[ ! -e $KATA_DIR/containerd-shim-kata-v2-rs ]] || all+=(kata-rs)
    [[ ${STACK_GVISOR:-} != 1 ]] || all+=(gvisor)
    options --env POOL=2
    rm -rf "${RUNS:?}/memory"
    attended scripts/node.sh run --virtual-time --stall 900 --out "$RUNS" "${options[@]}" -- \
        scripts/node/bench.sh memory memory "${KATA_COUNTS:-1,5,10}" "${all[@]}" runc >"$RUNS/memory.log" 2>&1 || status=$?
    ((status == 0)) || say "memory: exit code $status; the output is $RUNS/memory.log"
    return $status
}

only_check=no
while [[ ${1:-} == --* ]]; do
    case $1 in
    --check) only_check=yes ;;
    --fresh) rm -rf "$OUT" ;;
    *) die "unknown option '$1': see the head of $0" ;;
    esac
    shift
done
parts=("$@")
((${#parts[@]})) || parts=(serial host groups memory)
for part in "${parts[@]}"; do [[ $part =~ ^(serial|host|groups|memory)$ ]] || die "no such part '$part'"; done
check
[[ $only_check == no ]] || { say "$KATA_DIR has all that is needed: $(version)"; exit 0; }
mkdir -p "$RUNS"
say "Kata: $(version)"
NODE_FILES=$KATA_DIR scripts/node/payload.sh >/dev/null
for part in "${parts[@]}"; do
    began=$SECONDS
    if [[ -e $RUNS/$part/report.json ]]; then
        say "$part: exists already"
        continue
    fi
    if "$part" && [[ -e $RUNS/$part/report.json ]]; then
        say "$part: done after $((SECONDS - began)) s"
    else
        failed+=("$part")
        say "$part: failed after $((SECONDS - began)) s"
    fi
done
results=()
for part in serial host groups memory; do [[ ! -e $RUNS/$part/report.json ]] || results+=("$RUNS/$part"); done
if ((${#results[@]})); then
    "$CLI" report "${results[@]}" --baseline kata --published --output "$OUT/report.html"
    "$CLI" report --markdown --baseline kata "${results[@]}" | tee "$OUT/tables.md"
fi
((${#failed[@]} == 0)) || die "failed, or not whole: ${failed[*]}; their output is in $RUNS"
