#!/usr/bin/env bash
# Makes an image of Debian with real programs, which `make test-programs` runs, and prints the archive's path.
#   programs        PostgreSQL, redis, nginx, Python, gcc, make, git, strace, gdb, systemd, cron, sshd, rsync, squashfuse
#   programs-large  MariaDB, OpenJDK, Node.js, docker.io, podman
# It is cached by the hash of what makes it; the first call fetches some 150 MB (programs-large: 350) and takes some minutes.
# usage: programs-image.sh programs|programs-large
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

SUITE=bookworm
COMMON=(procps iproute2 curl)
SMALL=(
    postgresql-15 redis-server nginx-light python3 python3-venv gcc libc6-dev make git strace gdb systemd systemd-sysv dbus cron
    openssh-server openssh-client rsync squashfs-tools squashfuse fuse e2fsprogs
)
# Containers within a container need no base image but a static busybox.
LARGE=(mariadb-server-core mariadb-client-core openjdk-17-jdk-headless nodejs docker.io podman crun iptables busybox-static)
# Directories that the images of these programs declare as volumes.
VOLUMES=(/var/lib/postgresql/data /var/lib/mysql /var/lib/docker /var/lib/containers)
# Services of Debian's packages are on; those that cases start themselves would only make systemd slower.
OFF=(postgresql redis-server nginx ssh e2scrub_reap apt-daily.timer apt-daily-upgrade.timer)
# Room for the packages, the tree and the archive, while all three are there.
NEEDED_MIB=5120

# unpack DIR PACKAGE…: installs the packages, with their users and what their scripts make, into DIR/root.
unpack() {
    local dir=$1
    shift
    debian_sources deb "$SUITE" >"$dir/sources.list"
    # OpenJDK's scripts want the directory of manuals, which are left out.
    # shellcheck disable=SC2016 # for the shell of the hooks
    TMPDIR=$dir attended mmdebstrap --variant=minbase --mode=root --format=directory \
        --aptopt='Apt::Install-Recommends "false"' --dpkgopt=force-confold --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --essential-hook='mkdir -p "$1/usr/share/man/man1" "$1/etc/postgresql-common"; echo "create_main_cluster = false" >"$1/etc/postgresql-common/createcluster.conf"' \
        --customize-hook="chroot \"\$1\" systemctl disable ${OFF[*]} >/dev/null 2>&1 || :" \
        --include="$(IFS=,; printf '%s' "$*")" "$SUITE" "$dir/root" "$dir/sources.list" >"$dir/log" 2>&1
}

make_archive() {
    [[ ! -f $archive ]] || return 0
    [[ $(id -u) == 0 ]] || die "making $kind needs root (it unpacks owners and modes)"
    command -v mmdebstrap >/dev/null || die "no mmdebstrap: apt-get install mmdebstrap"
    local free work started=$SECONDS
    free=$(df --output=avail -m "$CACHE" | tail -n 1)
    ((free >= NEEDED_MIB)) || die "$CACHE has $free MiB free, $kind needs $NEEDED_MIB while it is made: free some, or set SANDBOXER_CACHE"
    rm -rf --one-file-system "$CACHE/programs/.partial-$kind".*
    work=$(mktemp -d "$CACHE/programs/.partial-$kind.XXXXXX")
    # shellcheck disable=SC2064 # the directory is known now
    trap "rm -rf --one-file-system '$work'" EXIT
    chmod 0755 "$work"
    say "installing $kind from Debian packages (some minutes, once)"
    if ! unpack "$work" "${packages[@]}"; then
        tail -n 15 "$work/log" >&2
        die "cannot make $kind: the last lines of mmdebstrap are above"
    fi
    rm -rf "$work"/root/var/{cache,log}/apt "$work"/root/var/cache/{apt,debconf}/* "$work"/root/var/lib/apt/lists/*
    find "$work/root" -xdev \( -type c -o -type b \) -delete
    # Volumes belong to whom their image gives them.
    mkdir -p "${VOLUMES[@]/#/"$work"/root}"
    [[ $kind != programs ]] || chroot "$work/root" chown postgres: /var/lib/postgresql/data
    rm -f "$CACHE/programs/$kind"-*.tar
    "$ROOT/scripts/oci-image.sh" owned "localhost/sandboxer/$kind:latest" "$archive" "$work/root" "${VOLUMES[@]}"
    say "$kind: $(du -sh "$work/root" | cut -f1), after $((SECONDS - started)) s"
}

kind=${1-}
case $kind in
programs) packages=("${COMMON[@]}" "${SMALL[@]}") ;;
programs-large) packages=("${COMMON[@]}" "${LARGE[@]}") ;;
*) die "usage: programs-image.sh programs|programs-large" ;;
esac
archive=$CACHE/programs/$kind-$(cat "${BASH_SOURCE[0]}" "$ROOT/scripts/oci-image.sh" | sha256sum | cut -c1-16).tar
with_lock "$CACHE/programs/.lock-$kind" make_archive >&2
printf '%s\n' "$archive"
