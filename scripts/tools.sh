#!/usr/bin/env bash
# Builds tools from their Go modules, unpatched, into the cache and prints their directories, one a line.
# usage: tools.sh [TOOL…]      TOOL: containerd, runc or helm; default: containerd and runc
# Building from the module proxy takes about two minutes on two cores; the second call takes none.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

CONTAINERD=${CONTAINERD_VERSION:-2.4.2}
RUNC=${RUNC_VERSION:-1.5.2}
HELM=${HELM_VERSION:-3.22.0}

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

helm() {
    go_tool helm "$HELM" "-X helm.sh/helm/v3/internal/version.version=v$HELM" "" helm.sh/helm/v3/cmd/helm@v"$HELM"
}

(($#)) || set -- containerd runc
for tool in "$@"; do
    case $tool in
    containerd) with_lock "$CACHE/tools/.lock-containerd-$CONTAINERD" containerd ;;
    runc) with_lock "$CACHE/tools/.lock-runc-$RUNC" runc ;;
    helm) with_lock "$CACHE/tools/.lock-helm-$HELM" helm ;;
    *) die "no tool '$tool': containerd, runc or helm" ;;
    esac
done
