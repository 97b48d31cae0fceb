# Measures start-up in node VMs, in parts, for the scripts that source it after lib.sh.
# shellcheck shell=bash

# in_parts DIR NAME PARTS SERIAL GROUP HANDLER… [-- OPTION…]: measures PARTS parts in one node in virtual time, each of SERIAL starts and,
# unless it is 0, a group of GROUP of each handler, and merges them into DIR/NAME. Handlers alternate from part to part, so that drift of
# the node affects all of them. OPTIONs are node.sh's. `stall` (60) of the caller: processor seconds without output after which
# the node is ended.
in_parts() {
    local dir=$1 name=$2 parts=$3 status=0 at=() part handlers=()
    local part_of=("$4" "$5")
    shift 5
    while (($#)) && [[ $1 != -- ]]; do handlers+=("$1") && shift; done
    [[ ${1:-} != -- ]] || shift
    # Parts of an earlier measurement may be of another version.
    rm -rf "${dir:?}/$name" "$dir/parts/$name".*
    mkdir -p "$dir/parts"
    attended "$ROOT/scripts/node.sh" run --virtual-time --stall "${stall:-60}" --out "$dir/parts" "$@" -- \
        scripts/node/bench.sh startup "$name" 1 "$parts" "${part_of[@]}" "${handlers[@]}" >"$dir/$name.log" 2>&1 || status=$?
    for ((part = 1; part <= parts; part++)); do
        [[ ! -d $dir/parts/$name.$part ]] || at+=("$dir/parts/$name.$part")
    done
    # A failed start is in the figures, and makes the node's exit code 1.
    if ((${#at[@]} < parts)); then
        tail -n 15 "$dir/$name.log" >&2
        say "$name: only ${#at[@]} of $parts parts were measured; exit code $status; the output is $dir/$name.log"
        return 1
    fi
    "$ROOT/target/release/sandboxer-bench" merge --parts "${at[@]}" --output "$dir/$name" >/dev/null
}
