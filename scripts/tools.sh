#!/usr/bin/env bash
# Builds containerd and runc, unpatched, into the cache and prints their directories, one a line.
# Building from the module proxy takes about two minutes on two cores; the second call takes none.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

CONTAINERD=${CONTAINERD_VERSION:-2.4.2}
RUNC=${RUNC_VERSION:-1.5.2}

# go_tool NAME VERSION LDFLAGS TAGS PACKAGE…: into $CACHE/tools/NAME-VERSION/bin, whole or not at all.
go_tool() {
    local name=$1 version=$2 ldflags=$3 tags=$4
    shift 4
    local dir="$CACHE/tools/$name-$version"
    if [[ ! -d $dir/bin ]]; then
        command -v go >/dev/null || die "building $name $version needs the go toolchain (https://go.dev/dl)"
        say "building $name $version into $dir"
        rm -rf "$dir.partial"
        mkdir -p "$dir.partial/bin" "$dir"
        GOBIN="$dir.partial/bin" GOFLAGS=-buildvcs=false go install -trimpath -ldflags "-s -w $ldflags" -tags "$tags" "$@" >&2 ||
            die "could not build $name $version"
        mv -T "$dir.partial/bin" "$dir/bin"
        rmdir "$dir.partial"
    fi
    printf '%s\n' "$dir/bin"
}

containerd() {
    local module=github.com/containerd/containerd/v2
    go_tool containerd "$CONTAINERD" "-X $module/version.Version=v$CONTAINERD" "" \
        $module/cmd/{containerd,ctr,containerd-shim-runc-v2}@v"$CONTAINERD"
}

runc() {
    go_tool runc "$RUNC" "-X main.version=$RUNC" seccomp github.com/opencontainers/runc@v"$RUNC"
}

with_lock "$CACHE/tools/.lock-containerd-$CONTAINERD" containerd
with_lock "$CACHE/tools/.lock-runc-$RUNC" runc
