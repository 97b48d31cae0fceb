#!/usr/bin/env bash
# Makes an image of the tools that `sandboxer-bench workload` runs, from Debian packages alone, and prints the archive's path.
#   bench-small    sysbench, fio, iperf3, sockperf, ab, cyclictest, hackbench, redis, nginx, mariadb, postmark, bench-helper
#   bench-build    g++, valgrind, lcov, cppcheck, catch2, bench-helper
# What comes from Debian is cached by the hash of this file; the first call fetches some 35 MB (bench-build: 120) and takes a
# minute. The helper is taken as it was built last (`make bench-helper`).
# With a directory, it makes the unpacked image there instead of an archive, for the series `native`: tools write in it, so nothing
# of it is shared with the cache.
# usage: bench-image.sh bench-small|bench-build [HELPER [DIRECTORY]]
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

SUITE=bookworm
SMALL=(
    sysbench fio iperf3 sockperf apache2-utils rt-tests redis-server redis-tools nginx-light mariadb-server-core
    mariadb-client-core postmark
)
# The shell and its tools are for lcov and genhtml, which are Perl programs that call others (without find, geninfo finds no data).
BUILD=(g++ valgrind lcov cppcheck catch2 dash coreutils findutils perl libcapture-tiny-perl libdatetime-perl)
# Room for the packages, the tree and the archive, while all three are there.
NEEDED_MIB=2048

# The mirror of the release that this host is installed from, so that a proxy or a local mirror is used here too.
sources() {
    local uri suite lines=()
    # shellcheck disable=SC2016 # apt's own variables
    while read -r uri suite; do
        case $suite in
        "$SUITE" | "$SUITE"-updates | "$SUITE"-security) lines+=("deb $uri $suite main") ;;
        esac
    done < <(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' | sort -u)
    ((${#lines[@]})) || die "apt knows no $SUITE release: run 'apt-get update' on Debian 12"
    printf '%s\n' "${lines[@]}"
}

# unpack PACKAGE…: the packages and what they depend on, unpacked into $work/root; their versions beside it.
# No maintainer script is run, so the image has no users, services or configuration but those in the packages.
unpack() {
    sources >"$work/sources.list"
    # shellcheck disable=SC2016 # for the shell of the hook
    TMPDIR=$work attended mmdebstrap --quiet --variant=extract --mode=root --format=directory \
        --aptopt='Apt::Install-Recommends "false"' \
        --extract-hook='ls "$1/var/cache/apt/archives" | sed -n "s/\.deb$//p" >"$1/packages"' \
        --include="$(IFS=,; printf '%s' "$*")" "$SUITE" "$work/root" "$work/sources.list" >"$work/log" 2>&1
}

# What no tool of the image reads.
prune() {
    local root=$1
    rm -rf "$root"/usr/share/{doc,man,locale,info,lintian,bash-completion,zsh,python3} "$root"/usr/lib/python3* \
        "$root"/var/{cache,log}/* "$root"/var/lib/{apt,dpkg}
    [[ $kind == bench-build ]] || rm -rf "$root"/usr/share/perl* "$root"/usr/lib/x86_64-linux-gnu/perl*
    find "$root" -xdev \( -type c -o -type b \) -delete
    mkdir -p "$root"/{dev,proc,sys,run,root,data,etc/nginx} "$root"/var/{log/nginx,lib/nginx,tmp}
    chmod 1777 "$root/tmp" "$root/var/tmp"
    # Servers refuse to run as a user that has no name.
    printf '%s\n' 'root:x:0:0:root:/root:/bin/sh' 'nobody:x:65534:65534:nobody:/:/bin/false' >"$root/etc/passwd"
    printf '%s\n' 'root:x:0:' 'nogroup:x:65534:' >"$root/etc/group"
    [[ $kind == bench-build ]] || configure_servers "$root"
}

configure_servers() {
    nginx_page "$1"
    # MariaDB begins with an empty directory and without accounts.
    mkdir -p "$1/etc/mysql"
    printf 'CREATE DATABASE IF NOT EXISTS sbtest;\n' >"$1/etc/mysql/bench.sql"
}

# One page of 106 bytes, as long as the answer that the thesis' client got; nothing of it is on a disk.
nginx_page() {
    local page
    page=$(printf '%0105d' 0)
    cat >"$1/etc/nginx/bench.conf" <<END
daemon off;
user root;
worker_processes auto;
pid /tmp/nginx.pid;
error_log stderr;
events { worker_connections 1024; }
http {
    access_log off;
    keepalive_requests 1000000;
    server { listen 8080; location / { return 200 "$page\n"; } }
}
END
}

fetch() {
    local dir=$1 free started=$SECONDS
    [[ $(id -u) == 0 ]] || die "making $kind needs root (it unpacks owners and modes)"
    command -v mmdebstrap >/dev/null || die "no mmdebstrap: apt-get install mmdebstrap"
    free=$(df --output=avail -m "$CACHE" | tail -n 1)
    ((free >= NEEDED_MIB)) || die "$CACHE has $free MiB free, $kind needs $NEEDED_MIB while it is made: free some, or set SANDBOXER_CACHE"
    rm -rf --one-file-system "$CACHE/bench"/.partial.*
    work=$(mktemp -d "$CACHE/bench/.partial.XXXXXX")
    # shellcheck disable=SC2064 # the directory is known now
    trap "rm -rf --one-file-system '$work'" EXIT
    say "unpacking $kind from Debian packages (a minute, once)"
    if ! unpack "${packages[@]}"; then
        tail -n 15 "$work/log" >&2
        die "cannot make $kind: the last lines of mmdebstrap are above"
    fi
    prune "$work/root"
    [[ -s $work/root/packages ]] || die "mmdebstrap did not tell the versions of the packages in $kind"
    mv -T "$work/root" "$dir"
    rm -rf --one-file-system "$work"
    say "$kind: $(wc -l <"$dir/packages") packages, $(du -sh "$dir" | cut -f1), after $((SECONDS - started)) s"
}

# The tree from Debian in $tree, and its hash in $key.
tree() {
    key=$(cat "${BASH_SOURCE[0]}" "$ROOT/scripts/oci-image.sh" | sha256sum | cut -c1-16)
    tree=$CACHE/bench/$kind-$key
    mkdir -p "$CACHE/bench"
    [[ -d $tree ]] || fetch "$tree" >&2
}

# The tree and the helper in $directory, and the directory's path.
unpacked() {
    local key tree
    [[ ! -e $directory || -e $directory/packages ]] || die "$directory exists and is not an unpacked image: name another directory"
    tree
    rm -rf --one-file-system "$directory"
    mkdir -p "$directory"
    cp -a --reflink=auto "$tree/." "$directory"
    install -m 0755 "$helper" "$directory/usr/bin/bench-helper"
    printf '%s\n' "$directory"
}

# The archive of a tree and a helper: made anew when one of them is another.
cached() {
    local key tree archive root
    tree
    archive=$CACHE/bench/$kind-$key-$(sha256sum "$helper" | cut -c1-16).tar
    if [[ ! -f $archive ]]; then
        root=$(mktemp -d "$CACHE/bench/.partial.XXXXXX")
        # shellcheck disable=SC2064 # the directory is known now
        trap "rm -rf --one-file-system '$root'" EXIT
        # Hard links: the tree is read only while it is archived.
        cp -al "$tree/." "$root"
        install -m 0755 "$helper" "$root/usr/bin/bench-helper"
        rm -f "$CACHE/bench/$kind-$key"-*.tar
        "$ROOT/scripts/oci-image.sh" tree "localhost/sandboxer/$kind:latest" "$archive" "$root"
    fi
    printf '%s\n' "$archive"
}

usage() { die "usage: bench-image.sh bench-small|bench-build [HELPER [DIRECTORY]]"; }
(($# >= 1 && $# <= 3)) || usage
kind=$1
case $kind in
bench-small) packages=("${SMALL[@]}") ;;
bench-build) packages=("${BUILD[@]}") ;;
*) usage ;;
esac
helper=${2:-$ROOT/target/bench-helper/x86_64-unknown-linux-gnu/release/bench-helper}
[[ -x $helper ]] || die "no $helper: run 'make bench-helper' first"
[[ $(ldd "$helper" 2>&1) != *' => '* ]] || die "$helper is not static: build it with 'make bench-helper'"
directory=${3-}
with_lock "$CACHE/bench/.lock" "$([[ -n $directory ]] && echo unpacked || echo cached)"
