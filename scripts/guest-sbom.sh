#!/usr/bin/env bash
# Lists what is in the guest image, with versions, licences and hashes, as target/guest/sbom.cdx.json (CycloneDX 1.5): the kernel, the
# agent, its crates, and the libraries of the toolchain and of Debian that are linked into it.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
export LC_ALL=C
GUEST=$ROOT/target/guest
AGENT_TARGET=x86_64-unknown-linux-gnu

sum() { sha256sum | cut -d ' ' -f 1; }

# row TYPE NAME VERSION LICENCE PURL SHA256: the last two may be empty.
row() { printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$@"; }

# From Debian's source only if it is the kernel that this source gives: SANDBOXER_KERNEL may be another one.
kernel() {
    local version source='' cached
    version=$(grep -aom 1 'Linux version [0-9][0-9.]*' "$GUEST/vmlinux" | cut -d ' ' -f 3)
    cached=$CACHE/kernel/$(scripts/guest-image.sh key)/vmlinux
    if cmp -s "$cached" "$GUEST/vmlinux"; then
        source="pkg:deb/debian/linux@$(dpkg-query -W -f '${source:Version}' "linux-source-${version%.*}")?arch=source"
    fi
    row operating-system linux "$version" GPL-2.0-only "$source" "$(sum <"$GUEST/vmlinux")"
}

# NAME VERSION CHECKSUM of each crate of the registry.
checksums() { awk -F '"' '/^name/ { name = $2 } /^version/ { version = $2 } /^checksum/ { print name, version, $2 }' Cargo.lock; }

crates() {
    local name version licence rest purl checksum
    declare -A of
    while read -r name version checksum; do of[$name-$version]=$checksum; done < <(checksums)
    # The same features as in the build; build scripts and macros do not get into the program.
    cargo tree --locked -p sandboxer-agent --target "$AGENT_TARGET" -e normal,no-proc-macro --prefix none --no-dedupe --format '{p}|{l}' | sort -u |
        while IFS='|' read -r rest licence; do
            read -r name version _ <<<"$rest"
            version=${version#v} checksum=${of[$name-$version]:-}
            [[ $name != sandboxer-agent ]] || checksum=$(cpio -i --quiet --to-stdout init <"$GUEST/initramfs.cpio" | sum)
            purl=''
            [[ $name == sandboxer-* ]] || purl=pkg:cargo/$name@$version
            # Older crates write `A/B` for a choice.
            row "$([[ $name == sandboxer-agent ]] && echo application || echo library)" "$name" "$version" "${licence//\// OR }" "$purl" "$checksum"
        done
    row library std "$(rustc --version | cut -d ' ' -f 2)" 'MIT OR Apache-2.0' '' ''
}

# debian FILE LICENCE: the source package of a static library that the compiler takes.
debian() {
    local package name version
    package=$(dpkg-query -S "$(realpath "$(gcc -print-file-name="$1")")" | cut -d : -f 1) || die "no package has $1"
    # shellcheck disable=SC2016 # dpkg's variables
    read -r name version < <(dpkg-query -W -f '${source:Package} ${source:Version}\n' "$package")
    row library "$name" "$version" "$2" "pkg:deb/debian/$name@$version?arch=source" ''
}

command -v jq >/dev/null || die "no jq: apt-get install jq"
{
    kernel
    crates
    debian libc.a LGPL-2.1-or-later
    debian libgcc_eh.a 'GPL-3.0-or-later WITH GCC-exception-3.1'
    debian libseccomp.a LGPL-2.1-only
} | jq -Rn '
    def given: if . == "" then null else . end;
    {
        bomFormat: "CycloneDX", specVersion: "1.5", version: 1,
        metadata: { component: { type: "firmware", name: "sandboxer guest image" } },
        components: [inputs | split("\t") | {
            type: .[0], name: .[1], version: .[2],
            licenses: (.[3] | given | if . then [{ expression: . }] else null end),
            purl: (.[4] | given),
            hashes: (.[5] | given | if . then [{ alg: "SHA-256", content: . }] else null end),
        } | with_entries(select(.value != null))],
    }' >"$GUEST/sbom.cdx.json.new"
mv "$GUEST/sbom.cdx.json.new" "$GUEST/sbom.cdx.json"
