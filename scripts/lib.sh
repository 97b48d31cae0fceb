# Shared by the scripts beside it: source it, don't run it.
# shellcheck shell=bash disable=SC2034

# The root of this clone.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

# What is dear to build (guest kernel, containerd) is kept outside the tree, so that `make clean`
# and a second clone don't pay for it again.
CACHE=${SANDBOXER_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/sandboxer}

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "$*"; exit 1; }

# with_lock FILE COMMAND…: one at a time per FILE, for everybody who uses the same cache.
with_lock() {
    local lock=$1
    shift
    mkdir -p "$(dirname "$lock")"
    (
        flock 9
        "$@"
    ) 9>"$lock"
}

# attended COMMAND…: runs it with no input, so that it ends when this script is told to: bash alone would wait for its end, and
# after an interrupt that it survived go on as if nothing were.
attended() {
    local pid status=0
    "$@" </dev/null &
    pid=$!
    # shellcheck disable=SC2064 # its number is known now
    trap "kill -TERM $pid 2>/dev/null; wait $pid; exit 130" INT TERM HUP
    wait "$pid" || status=$?
    trap - INT TERM HUP
    return $status
}

# stack_names DIR: sets DIR (absolute), HASH, RUN, CGROUP and NETWORK. Everything of a stack that must have a
# name outside DIR carries HASH. Sockets live in RUN, since DIR may be too long for the path of a unix socket:
# its limit is 107 bytes, and with a pod's 64 digits in it 19 are left for a name below RUN/sandboxer/pods/ID.
stack_names() {
    DIR=$(realpath -m "$1")
    HASH=$(printf '%s' "$DIR" | sha256sum | cut -c1-8)
    RUN=/run/sbx-$HASH
    CGROUP=/sandboxer-$HASH
    NETWORK=sandboxer-$HASH
}

# stat_field PID N: field N (3 or later) of proc(5)'s stat; the command's name, field 2, may hold anything.
stat_field() {
    local stat
    { stat=$(<"/proc/$1/stat"); } 2>/dev/null || return 1
    stat=${stat##*) }
    # shellcheck disable=SC2086
    set -- "$2" $stat
    shift $(($1 - 2))
    printf '%s' "$1"
}

# owned_pids: the shims, VMMs and tools of the stack DIR, whoever their parent is by now. A process is the
# stack's if its command line, an open file or the mark that the daemon gives each VMM names a path of the
# stack, or if it is in the stack's cgroup. A user's `less DIR/log` is none: what runs is checked first.
owned_pids() {
    local dir pid exe
    for dir in /proc/[0-9]*; do
        pid=${dir#/proc/}
        if grep -qF -- "$CGROUP" "$dir/cgroup" 2>/dev/null; then
            printf '%s\n' "$pid"
            continue
        fi
        exe=$(readlink "$dir/exe" 2>/dev/null) || continue
        case ${exe##*/} in
        containerd | containerd-shim-* | sandboxer | sandboxer-front | sandboxer-failing | sandboxer-share | qemu-system-* | cloud-hypervisor | runc | ctr | *.erofs) ;;
        *) continue ;;
        esac
        if grep -qzF -e "$RUN/" -e "$DIR/" "$dir/cmdline" 2>/dev/null ||
            grep -qzF "SANDBOXER_RUN_DIR=$RUN/" "$dir/environ" 2>/dev/null ||
            [[ -n $(find "$dir/fd" \( -lname "$DIR/*" -o -lname "$RUN/*" \) -print -quit 2>/dev/null) ]]; then
            printf '%s\n' "$pid"
        fi
    done
}

# cargo_tool NAME VERSION: puts it into the cache, once, and prints its path.
cargo_tool() {
    local program=$CACHE/tools/$1-$2/bin/$1
    with_lock "$CACHE/tools/.lock" install_cargo_tool "$1" "$2" "$program" >&2 || return
    printf '%s' "$program"
}

install_cargo_tool() {
    [[ ! -x $3 ]] || return 0
    say "building $1 $2 into the cache (some minutes on two cores, once)"
    local build status=0
    build=$(mktemp -d)
    cargo install --quiet --locked --version "$2" --root "${3%/bin/*}" --target-dir "$build" "$1" || status=$?
    rm -rf "$build"
    return $status
}
