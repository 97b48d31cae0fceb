#!/usr/bin/env bash
# Packs the results of `make build-bench guest-image` as two Debian packages, target/deb/sandboxer_VERSION-REVISION_amd64.deb and
# sandboxer-bench_…, and prints their paths, one a line. It builds nothing and needs no root.
# usage: deb.sh [REVISION]      REVISION: the part of the version that counts packages of one release (default 1)
# Equal inputs give equal bytes: every file has the time SOURCE_DATE_EPOCH (default: that of the last commit) and is root's.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
umask 022
export LC_ALL=C

REVISION=${1:-1}
SOURCES=$ROOT/vmm-configs/debian
OUT=$ROOT/target/deb
GUEST=$ROOT/target/guest

check_host() {
    local tool
    for tool in dpkg-deb:dpkg dpkg-shlibdeps:dpkg-dev gzip:gzip; do
        command -v "${tool%:*}" >/dev/null || die "no ${tool%:*}: apt-get install ${tool#*:}"
    done
    [[ -x target/release/sandboxer-bench && -f $GUEST/vmlinux && -f $GUEST/sbom.cdx.json ]] ||
        die "the programs or the guest image are missing: run 'make build-bench guest-image' first"
    [[ $REVISION =~ ^[0-9][0-9a-z.+~]*$ ]] || die "revision '$REVISION': a digit, then digits, letters, '.', '+' and '~'"
}

version() { sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml; }

# The first glibc that reads relocations as a bitmap, as crates/sandboxer/build.rs makes them. dpkg-shlibdeps does not see these.
RELR=2.36

# Prints the libraries that the programs are linked with, as Debian's packages and their oldest versions.
libraries() {
    local programs found glibc
    mapfile -t programs < <(find "$root/usr/bin" -type f)
    mkdir -p "$work/debian"
    # shellcheck disable=SC2016 # dpkg's variable
    printf 'Source: sandboxer\n\nPackage: sandboxer\nArchitecture: amd64\nDepends: ${shlibs:Depends}\n' >"$work/debian/control"
    found=$(cd "$work" && dpkg-shlibdeps -O --warnings=0 "${programs[@]}" | sed -n 's/^shlibs:Depends=//p')
    glibc=$(sed -n 's/.*libc6 (>= \([^)]*\)).*/\1/p' <<<"$found")
    [[ -n $glibc ]] || die "dpkg-shlibdeps found no libc6: '$found'"
    if dpkg --compare-versions "$glibc" lt "$RELR"; then found=${found/"libc6 (>= $glibc)"/"libc6 (>= $RELR)"}; fi
    printf '%s' "$found"
}

# Every key stays a comment: an upgrade then changes defaults without asking about the file.
configuration() {
    mkdir -p "$root/etc/sandboxer"
    sed 's/^\([a-z_]* = \)/# \1/' vmm-configs/sandboxer.toml >"$root/etc/sandboxer/config.toml"
    printf '/etc/sandboxer/config.toml\n' >"$root/DEBIAN/conffiles"
}

# documents NAME: what each package has.
documents() {
    local doc=$root/usr/share/doc/$1 kernel
    mkdir -p "$doc" "$root/usr/share/lintian/overrides"
    kernel=$(grep -aom 1 'Linux version [^ ]* ([^)]*)' "$GUEST/vmlinux") || die "$GUEST/vmlinux does not tell its version"
    sed "s|@KERNEL@|${kernel%% (*}.|" "$SOURCES/copyright" >"$doc/copyright"
    gzip -9nc CHANGELOG.md >"$doc/changelog.gz"
    printf '%s (%s) unstable; urgency=medium\n\n  * See changelog.gz.\n\n -- %s  %s\n' "$1" "$full" \
        "$(sed -n 's/^Maintainer: //p' "$SOURCES/control")" "$(date -Rud "@$SOURCE_DATE_EPOCH")" |
        gzip -9nc >"$doc/changelog.Debian.gz"
    sed -n "/^#/p; /^$1: /p" "$SOURCES/lintian-overrides" >"$root/usr/share/lintian/overrides/$1"
    find "$root/usr/share/man" -type f -exec gzip -9n {} +
}

# What the daemon's package has beside that.
more_documents() {
    local doc=$root/usr/share/doc/sandboxer program
    cp vmm-configs/kernel/sandboxer.config "$doc/kernel.config"
    cp "$GUEST/sbom.cdx.json" "$doc/guest.cdx.json"
    cp "$SOURCES/README.Debian" README.md SECURITY.md "$doc/"
    # Parts of the daemon, which nobody runs by hand: its page tells of them.
    for program in sandboxer-front sandboxer-share containerd-shim-sandboxer-v{1,2}; do
        ln -s sandboxer.8.gz "$root/usr/share/man/man8/$program.8.gz"
    done
}

# pack NAME CONTROL: packs the files in $root, and prints the package's path.
pack() {
    local size package=$OUT/$1_${full}_amd64.deb
    size=$(du -sk --apparent-size --exclude=DEBIAN "$root" | cut -f 1)
    sed -e "s|@VERSION@|$full|; s|@SIZE@|$size|; s|@LIBRARIES@|$(libraries)|" "$SOURCES/$2" >"$root/DEBIAN/control"
    (cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
    find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    # With more threads the compressed bytes depend on their number.
    dpkg-deb --root-owner-group --threads-max=1 -Zxz --build "$root" "$work/package.deb" >&2
    mv "$work/package.deb" "$package"
    say "$1: $(du -h "$package" | cut -f 1), sha256 $(sha256sum "$package" | cut -d ' ' -f 1)"
    printf '%s\n' "$package"
}

# begin NAME: makes $root anew.
begin() {
    root=$work/$1
    mkdir -p "$root/DEBIAN"
}

daemon() {
    local script
    begin sandboxer
    make -s install DESTDIR="$root"
    configuration
    documents sandboxer
    more_documents
    for script in postinst prerm postrm; do install -m 0755 "$SOURCES/$script" "$root/DEBIAN/$script"; done
    pack sandboxer control
}

bench() {
    begin sandboxer-bench
    make -s install-bench DESTDIR="$root"
    documents sandboxer-bench
    pack sandboxer-bench control.bench
}

check_host
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)} || die "this is no git clone: set SOURCE_DATE_EPOCH to a time, in seconds"
export SOURCE_DATE_EPOCH
full=$(version)-$REVISION
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$OUT"
daemon
bench
