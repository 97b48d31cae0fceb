#!/usr/bin/env bash
# Measures start-up and memory on a usable KVM, in node VMs: figures in virtual time, which repeat. docs/measuring.md says what they
# mean and what they do not. Each VMM is measured beside runc in its own runs; ratios are of one run.
# usage: bench-kvm.sh [PART…]
#   serial   one start after the other: boot, template, pool and runc
#   again    the same once more, to see how far two runs agree
#   groups   fifty at once: whole groups of each handler and of runc, with a pool of 8
#   pooled   the same with a pool of as many VMs as a group has pods; into a report of its own, target/bench-kvm/pooled
#   sustained  BENCH_SUSTAINED (60) starts without pauses: pods a minute, and processor time a pod
#   memory   PSS at 1, 10 and 50 pods
#   commands BENCH_EXECS (20) commands in a running container, of the pool's handler and of runc
#   checkpoint BENCH_ROUNDS saves of a pod of QEMU, and starts from there, one and BENCH_COPIES (10) at once, with BENCH_FILLED (16,128) MiB filled
# (default: serial groups pooled sustained memory). Existing runs in target/bench-kvm/runs are kept; `--fresh` removes them first.
# CLOUD_HYPERVISOR and FIRECRACKER name VMMs that Debian does not have. BENCH_SERIAL (20), BENCH_GROUP (50), BENCH_ROUNDS (3; fewer give no interval), BENCH_COUNTS
# (1,10,50), BENCH_POOL (2; 8 for groups), BENCH_HANDLERS (pool template boot), BENCH_MIB (256), BENCH_MEMORY (MiB of each node),
# BENCH_OTHERS (handlers beside runc, such as gvisor, whose payload is made with STACK_GVISOR=1 make node), BENCH_VMMS and BENCH_LIMIT (seconds for each node, default 3600) change the plan.
# BENCH_OUT (target/bench-kvm) is where results go.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=scripts/node/parts.sh
. "$(dirname "$0")/node/parts.sh"
cd "$ROOT"
OUT=$(realpath -m "${BENCH_OUT:-$ROOT/target/bench-kvm}")
RUNS=$OUT/runs
CLI=$ROOT/target/release/sandboxer-cli
BENCH=$ROOT/target/release/sandboxer-bench
failed=()

# in_node NAME POOL ARGUMENT…: one run of scripts/node/bench.sh. A run that fails is named at the end and is not in the
# figures.
in_node() {
    local name=$1 pool=$2 began=$SECONDS status=0
    shift 2
    if [[ -e $RUNS/$name/report.json ]]; then
        say "$name: exists already"
        return
    fi
    rm -rf "${RUNS:?}/$name"
    attended scripts/node.sh run --virtual-time --memory "${BENCH_MEMORY:-8192}" --limit "${BENCH_LIMIT:-2400}" --stall 500 --out "$RUNS" \
        --env STACK_VMM="$vmm" --env STACK_SUFFIX="$suffix" --env STACK_MEMORY="$mib" --env POOL="$pool" \
        --env STACK_GVISOR="${STACK_GVISOR:-0}" -- \
        scripts/node/bench.sh "$1" "$name" "${@:2}" >"$RUNS/$name.log" 2>&1 || status=$?
    say "$name: exit code $status after $((SECONDS - began)) s"
    if ((status)); then
        tail -n 5 "$RUNS/$name.log" >&2
        failed+=("$name")
    fi
}

# measured NAME POOL PARTS SERIAL GROUP HANDLER… [--env …]: one run, in parts.
measured() {
    local name=$1 pool=$2 began=$SECONDS status=0 of=()
    shift 2
    while (($#)) && [[ $1 != --env ]]; do of+=("$1") && shift; done
    if [[ -e $RUNS/$name/report.json ]]; then
        say "$name: exists already"
        return
    fi
    in_parts "$RUNS" "$name" "${of[@]}" -- "$@" --memory "${BENCH_MEMORY:-8192}" --limit "${BENCH_LIMIT:-3600}" --env STACK_VMM="$vmm" \
        --env STACK_SUFFIX="$suffix" --env STACK_MEMORY="$mib" --env POOL="$pool" --env STACK_GVISOR="${STACK_GVISOR:-0}" || status=$?
    say "$name: exit code $status after $((SECONDS - began)) s"
    ((status == 0)) || failed+=("$name")
}

starts() { measured "$vmm-$1" "${BENCH_POOL:-2}" "$(((${BENCH_SERIAL:-20} + 1) / 2))" 2 0 "${handlers[@]}" runc "${others[@]}"; }
serial() { starts serial; }
again() { starts again; }
# whole NAME POOL HANDLER…: fifty pods, and a page cache, must fit into the node.
whole() {
    # Nothing is printed until the first of fifty has started.
    local stall=600 BENCH_MEMORY=${BENCH_MEMORY:-10240} name=$1 pool=$2
    shift 2
    measured "$vmm-$name" "$pool" "${BENCH_ROUNDS:-3}" 0 "${BENCH_GROUP:-50}" "$@" runc "${others[@]}" --env PAUSE=60 --env START_TIMEOUT=600
}
groups() { whole groups "${BENCH_POOL:-8}" "${handlers[@]}"; }
pooled() { whole pooled "${BENCH_GROUP:-50}" "sandboxer$suffix"; }
sustained() {
    local BENCH_MEMORY=${BENCH_MEMORY:-8192}
    measured "$vmm-sustained" "${BENCH_POOL:-8}" 1 0 0 "${handlers[@]}" runc "${others[@]}" --env BENCH_ARGUMENTS="--sustained ${BENCH_SUSTAINED:-60}"
}
memory() {
    local measured=("sandboxer$suffix")
    # Once is enough: memory is not a ratio of one run.
    [[ $vmm != qemu ]] || measured+=(runc "${others[@]}")
    in_node "$vmm-memory" "${BENCH_POOL:-2}" memory "${BENCH_COUNTS:-1,10,50}" "${measured[@]}"
}
commands() {
    in_node "$vmm-commands" "${BENCH_POOL:-2}" commands "${BENCH_EXECS:-20}" "sandboxer$suffix" runc "${others[@]}"
    cat "$RUNS/$vmm-commands.log"
}

checkpoint() {
    if [[ $vmm != qemu ]]; then
        say "$vmm: not measured, as it saves no pods"
        return
    fi
    # Without a pool: a cold start is a copy of a template.
    in_node "$vmm-checkpoint" 0 checkpoint "${BENCH_FILLED:-16,128}" "${BENCH_ROUNDS:-3}" "${BENCH_COPIES:-10}" sandboxer-template runc
    cat "$RUNS/$vmm-checkpoint.log"
}

# result NAME DIR…: merges several runs into one result.
result() {
    local name=$1
    shift
    (($#)) || return 0
    rm -rf "${OUT:?}/$name"
    "$BENCH" merge "$@" --output "$OUT/$name" >/dev/null
    cp "$OUT/$name/report.json" "$OUT/${name/#startup/report}.json"
}

if [[ ${1:-} == --fresh ]]; then
    rm -rf "$OUT"
    shift
fi
parts=("$@")
((${#parts[@]})) || parts=(serial groups pooled sustained memory)
for part in "${parts[@]}"; do [[ $part =~ ^(serial|again|groups|pooled|sustained|memory|commands|checkpoint)$ ]] || die "no such part '$part'"; done
mkdir -p "$RUNS"
read -ra others <<<"${BENCH_OTHERS:-}"
vmms=${BENCH_VMMS:-qemu${CLOUD_HYPERVISOR:+ cloud-hypervisor}${FIRECRACKER:+ firecracker}}
[[ $vmms == *cloud-hypervisor* ]] || say "not measured: Cloud Hypervisor; set CLOUD_HYPERVISOR to its program, Debian has none"
[[ $vmms == *firecracker* ]] || say "not measured: Firecracker; set FIRECRACKER to its program, Debian has none"
for part in "${parts[@]}"; do
    for vmm in $vmms; do
        case $vmm in
        qemu) suffix='' ;;
        cloud-hypervisor) suffix=-ch ;;
        firecracker) suffix=-fc ;;
        *) die "no such VMM '$vmm'" ;;
        esac
        mib=${BENCH_MIB:-256}
        handlers=()
        for path in ${BENCH_HANDLERS:-pool template boot}; do
            [[ $path == pool ]] && handlers+=("sandboxer$suffix") || handlers+=("sandboxer-$path$suffix")
        done
        "$part"
    done
done

shopt -s nullglob
startups=() pooled=() memories=()
for run in "$RUNS"/*/; do
    [[ -e $run/report.json ]] || continue
    case $(basename "$run") in
    parts | *-commands | *-checkpoint) ;;
    *-memory) memories+=("$run") ;;
    *-again) ;;
    *-pooled) pooled+=("$run") ;;
    *) startups+=("$run") ;;
    esac
done
result startup "${startups[@]}"
result pooled "${pooled[@]}"
result memory "${memories[@]}"
pages=()
for page in startup pooled memory; do [[ ! -e $OUT/$page/report.json ]] || pages+=("$OUT/$page"); done
if ((${#pages[@]})); then
    "$CLI" report "${pages[@]}" --output "$OUT/report.html"
    "$CLI" report --markdown "${pages[@]}" | tee "$OUT/tables.md"
fi
for vmm in $vmms; do
    [[ -e $RUNS/$vmm-serial/report.json && -e $RUNS/$vmm-again/report.json ]] || continue
    COLUMNS=160 "$CLI" compare "$RUNS/$vmm-serial" "$RUNS/$vmm-again" | tee "$OUT/agreement-$vmm.txt"
done
((${#failed[@]} == 0)) || die "not in the figures, since they failed: ${failed[*]}; their output is in $RUNS"
