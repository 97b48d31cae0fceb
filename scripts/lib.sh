# Shared by the scripts in this directory: source it, do not run it.
# shellcheck shell=bash disable=SC2034

# The root of this clone.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

# Files that are slow to build (guest kernel, containerd) are kept outside the tree, so that `make clean`
# and a second clone do not build them again.
CACHE=${SANDBOXER_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/sandboxer}

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "$*"; exit 1; }

# with_lock FILE COMMAND…: runs one COMMAND at a time per FILE, for all users of the same cache.
with_lock() {
    local lock=$1
    shift
    mkdir -p "$(dirname "$lock")"
    (
        flock 9
        "$@"
    ) 9>"$lock"
}

# attended COMMAND…: runs it without input, and ends it when this script receives a signal. Bash alone would wait for its end and,
# if the command survives an interrupt, continue.
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

# debian_sources TYPE SUITE: prints sources (TYPE deb or deb-src) of Debian's SUITE, with its updates, from the mirror that this host's apt
# uses: so a proxy or a local mirror is used here too.
debian_sources() {
    local type=$1 suite=$2 uri of lines=()
    # shellcheck disable=SC2016 # apt's own variables
    while read -r uri of; do
        case $of in
        "$suite" | "$suite"-updates | "$suite"-security) lines+=("$type $uri $of main") ;;
        esac
    done < <(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' | sort -u)
    ((${#lines[@]})) || die "apt knows no $suite release: run 'apt-get update' on Debian 12"
    printf '%s\n' "${lines[@]}"
}

# stack_names DIR: sets DIR (absolute), HASH, RUN, CGROUP and NETWORK. All names of a stack outside DIR contain
# HASH. Sockets are in RUN, since DIR may be too long for the path of a unix socket: its limit is 107 bytes. With a
# pod's 64 digits in it, 19 bytes remain for a name below RUN/sandboxer/pods/ID.
stack_names() {
    DIR=$(realpath -m "$1")
    HASH=$(printf '%s' "$DIR" | sha256sum | cut -c1-8)
    RUN=/run/sbx-$HASH
    CGROUP=/sandboxer-$HASH
    NETWORK=sandboxer-$HASH
}

# stat_field PID N: prints field N (3 or later) of proc(5)'s stat; field 2, the command's name, may contain any character.
stat_field() {
    local stat
    { stat=$(<"/proc/$1/stat"); } 2>/dev/null || return 1
    stat=${stat##*) }
    # shellcheck disable=SC2086
    set -- "$2" $stat
    shift $(($1 - 2))
    printf '%s' "$1"
}

# owned_pids: prints the shims, VMMs and tools of the stack DIR, whatever their parent is now. A process belongs to the
# stack if its command line, an open file or the daemon's mark on each VMM contains a path of the stack, or if it is in
# the stack's cgroup. A user's `less DIR/log` does not belong to it: the program is checked first.
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
        containerd | containerd-shim-* | sandboxer | sandboxer-front | sandboxer-failing | sandboxer-share | qemu-system-* | cloud-hypervisor | firecracker | runc | runsc | virtiofsd | ctr | dockerd | crio | conmon | *.erofs) ;;
        *) continue ;;
        esac
        if grep -qzF -e "$RUN/" -e "$DIR/" "$dir/cmdline" 2>/dev/null ||
            grep -qzF "SANDBOXER_RUN_DIR=$RUN/" "$dir/environ" 2>/dev/null ||
            [[ -n $(find "$dir/fd" \( -lname "$DIR/*" -o -lname "$RUN/*" \) -print -quit 2>/dev/null) ]]; then
            printf '%s\n' "$pid"
        fi
    done
}

# cargo_tool NAME VERSION: installs it into the cache, once, and prints its path.
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

# debian_program PACKAGE PATH: unpacks a Debian package into the cache, once, and prints the absolute path of a program in it. For a package
# that would start a service if it was installed.
debian_program() {
    local dir=$CACHE/tools/debian-$1
    with_lock "$CACHE/tools/.lock-debian" unpack_debian_package "$1" "$dir" >&2 || return
    [[ -x $dir/$2 ]] || die "Debian's package $1 has no $2"
    printf '%s' "$dir/$2"
}

unpack_debian_package() {
    [[ ! -d $2 ]] || return 0
    local work status=0
    work=$(mktemp -d)
    # As root, apt would download as its own user, who cannot write there.
    (cd "$work" && apt-get -qq -o APT::Sandbox::User=root download "$1" && dpkg-deb -x ./*.deb root && mkdir -p "${2%/*}" && mv root "$2") || status=$?
    rm -rf "$work"
    ((status == 0)) || die "cannot download Debian's package $1: run apt-get update"
}

# --- processes of the stack DIR: known by pid and start time ----------------------------------------------------

# running NAME: prints its pid if the recorded process still is the one that was started, and not a zombie.
running() {
    local pid start
    { read -r pid start <"$DIR/pids/$1"; } 2>/dev/null || return 1
    [[ -n $start && $(stat_field "$pid" 22) == "$start" ]] && alive "$pid" && printf '%s' "$pid"
}

# A zombie does not run any more, however long its parent (often pid 1 here) takes to reap it.
alive() { local state; state=$(stat_field "$1" 3) && [[ $state != [ZX] ]]; }

# gone PID SECONDS: succeeds if the process has ended by then. Bash has no pidfd, so this polls.
gone() {
    local end=$((SECONDS + $2))
    while alive "$1"; do
        ((SECONDS < end)) || return 1
        sleep 0.02
    done
}

# end_pid PID SECONDS: sends SIGTERM, waits, then sends SIGKILL.
end_pid() {
    kill -TERM "$1" 2>/dev/null || return 0
    gone "$1" "$2" && return
    say "process $1 did not end within $2 s: killed"
    kill -KILL "$1" 2>/dev/null || true
    gone "$1" 5 || say "process $1 is still there"
}

# start NAME COMMAND…: starts it unless it already runs.
start() {
    local name=$1
    shift
    ! running "$name" >/dev/null || return 0
    "$ROOT/scripts/start-ready.pl" "$RUN/$name.notify" "$DIR/$name/log" "$DIR/pids/$name" 60 "$@"
}

# other_node: prints the directory of another stack with a Kubernetes node on it, if there is one.
other_node() {
    local file dir
    for file in /run/sbx-*/dir; do
        dir=$(cat "$file" 2>/dev/null) || continue
        [[ $dir == "$DIR" || ! -e $dir/kubernetes ]] || printf '%s\n' "$dir"
    done | head -n 1
}
