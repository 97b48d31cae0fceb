# Measures start-up in node VMs, in parts, for the scripts that source it after lib.sh.
# shellcheck shell=bash

clock=()

# in_parts DIR NAME PARTS SERIAL GROUP HANDLER… [-- OPTION…]: measures PARTS parts, each of SERIAL starts and, unless it is 0, a group
# of GROUP of each handler, and merges them into DIR/NAME. OPTIONs are node.sh's. The emulator may lose a guest
# (docs/decisions/0009-node-vm.md), which then spins forever. Such a part is discarded, its node ends, and another node measures the
# remaining parts. Variables of the caller: `stall` (60): processor seconds without output after which a guest counts as lost;
# `clock`: node.sh's options that select the node's clock (default: virtual time).
in_parts() {
    local dir=$1 name=$2 parts=$3 status=75 tries=0 there=0 at part handlers=()
    local part_of=("$4" "$5")
    local of_time=("${clock[@]}")
    ((${#of_time[@]})) || of_time=(--virtual-time)
    shift 5
    while (($#)) && [[ $1 != -- ]]; do handlers+=("$1") && shift; done
    [[ ${1:-} != -- ]] || shift
    # Parts of an earlier measurement may be of another version.
    rm -rf "${dir:?}/$name" "$dir/parts/$name".*
    mkdir -p "$dir/parts"
    while ((there < parts && tries < ${BENCH_TRIES:-20})); do
        tries=$((tries + 1)) status=0
        attended "$ROOT/scripts/node.sh" run "${of_time[@]}" --stall "${stall:-60}" --out "$dir/parts" "$@" -- \
            scripts/node/bench.sh startup "$name" "$((there + 1))" "$((parts - there))" "${part_of[@]}" "${handlers[@]}" \
            >"$dir/$name.$tries.log" 2>&1 || status=$?
        there=0
        while [[ -d $dir/parts/$name.$((there + 1)) ]]; do there=$((there + 1)); done
        # A failed start is in the figures: it is no reason to try another node.
        case $status in
        0 | 75 | 123) say "$name: $there of $parts parts, in $tries nodes" ;;
        *)
            tail -n 15 "$dir/$name.$tries.log" >&2
            return "$status"
            ;;
        esac
    done
    ((there >= parts)) || { say "$name: not measured in $tries nodes"; return 1; }
    at=()
    for ((part = 1; part <= parts; part++)); do at+=("$dir/parts/$name.$part"); done
    "$ROOT/target/release/sandboxer-cli" merge --parts "${at[@]}" --output "$dir/$name" >/dev/null
}
