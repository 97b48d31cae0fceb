#!/usr/bin/env bash
# Builds the guest image a second time, from a copy of the clone at another path and without any cache, and compares the bytes with
# target/guest. Takes as long as a first build of the guest image: some 12 minutes on two cores.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
started=$SECONDS
[[ -z ${SANDBOXER_KERNEL:-} ]] || die "SANDBOXER_KERNEL names a kernel that is not built here: unset it"
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
trap 'exit 130' INT TERM HUP

# All files that git does not ignore, including uncommitted changes.
git ls-files -z --cached --others --exclude-standard | xargs -0 -r ls -d 2>/dev/null | cpio --quiet -pdm "$work/clone"
attended env -u CARGO_TARGET_DIR SANDBOXER_CACHE="$work/cache" make -C "$work/clone" guest-image >"$work/log" 2>&1 || {
    tail -n 20 "$work/log" >&2
    die "the second build failed"
}
for file in vmlinux initramfs.cpio sbom.cdx.json; do
    cmp "target/guest/$file" "$work/clone/target/guest/$file" || die "$file differs between two builds"
done
(cd target/guest && sha256sum vmlinux initramfs.cpio sbom.cdx.json)
say "the second build has the same bytes, after $((SECONDS - started)) s"
