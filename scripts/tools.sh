#!/usr/bin/env bash
# Builds tools from their Go modules, unpatched, into the cache and prints their directories, one a line.
# usage: tools.sh [TOOL…]      TOOL: containerd, runc, crictl, helm, kubernetes (API server, kubelet, kubectl), apiserver (of Kubernetes, that alone),
#                              controllers (of Kubernetes: its controller manager), docker (its daemon, its command line and an init; two directories),
#                              crio (CRI-O with pinns and conmon) or gvisor (runsc and its shim, for comparison);
#                              default: containerd and runc
# Building from the module proxy takes about two minutes on two cores (docker: some more; gVisor: three; Kubernetes: 3 to 25, by what Go has in its
# caches); the second call takes none.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

CONTAINERD=${CONTAINERD_VERSION:-2.4.2}
RUNC=${RUNC_VERSION:-1.5.2}
CRICTL=${CRICTL_VERSION:-1.34.0}
HELM=${HELM_VERSION:-3.22.0}
KUBERNETES=${KUBERNETES_VERSION:-1.34.2}
# docker's daemon, and its command line.
MOBY=${MOBY_VERSION:-2.0.0-beta.24}
DOCKER=${DOCKER_VERSION:-29.8.2}
CRIO=${CRIO_VERSION:-1.34.0}
# A commit of gVisor's branch `go`, which has no tags. Newer ones need a newer Go.
GVISOR=${GVISOR_VERSION:-0.0.0-20260701204157-69c2d17aea96}

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
        # Nothing half-built stays, also after Ctrl-C.
        # shellcheck disable=SC2064 # the directory is known now
        trap "rm -rf '$dir.partial'; rmdir '$dir' 2>/dev/null || true" EXIT
        trap 'exit 130' INT TERM HUP
        go_install "$dir.partial/bin" "$ldflags" "$tags" "$@" >&2 ||
            die "could not build $name $version (go's reason is above; it downloads by GOPROXY=$(go env GOPROXY))"
        mv -T "$dir.partial/bin" "$dir/bin"
        rmdir "$dir.partial"
        trap - EXIT INT TERM HUP
    fi
    printf '%s\n' "$dir/bin"
}

# go_install DIR LDFLAGS TAGS PACKAGE@VERSION…: go installs no module whose go.mod replaces or excludes others (containerd 1.x), so such a one is
# built in a copy of its own. So is docker's command line, whose go.mod and go.sum have other names, and with GO_IN_COPY=1 any: go reads the list of
# a module's versions before it installs from it, which a proxy may not have.
go_install() {
    local bin=$1 ldflags=$2 tags=$3 source copy status=0
    shift 3
    local flags=(-trimpath -ldflags "-s -w $ldflags" -tags "$tags")
    export GOFLAGS=-buildvcs=false
    source=$(go mod download -json "$(module_of "$1")" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
    if [[ -z ${GO_IN_COPY:-} && ! -e $source/vendor.mod ]] && ! grep -qE '^(replace|exclude)' "$source/go.mod"; then
        GOBIN=$bin go install "${flags[@]}" "$@"
        return
    fi
    copy=$(mktemp -d)
    cp -r "$source/." "$copy"
    chmod -R u+w "$copy"
    if [[ -e $copy/vendor.mod ]]; then
        # A module has only the list of the directory that it vendors.
        rm -rf "$copy/vendor"
        mv "$copy/vendor.mod" "$copy/go.mod"
        mv "$copy/vendor.sum" "$copy/go.sum"
    fi
    set -- "${@%@*}"
    (cd "$copy" && go build -mod=mod "${flags[@]}" -o "$bin/" "$@") || status=$?
    rm -rf "$copy"
    return $status
}

# go_build_kubernetes DIR VERSION COMMAND…: its module replaces some thirty others by directories that are not part of it, so a module of one's own
# replaces them by their releases, which have the same minor and patch version.
go_build_kubernetes() {
    local bin=$1 version=$2 minor source copy name status=0
    shift 2
    minor=${version#1.}
    minor=${minor%%.*}
    export GOFLAGS=-buildvcs=false
    source=$(go mod download -json k8s.io/kubernetes@v"$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
    copy=$(mktemp -d)
    {
        printf 'module local/kubernetes\n'
        grep -E '^(go|godebug) ' "$source/go.mod"
        printf 'require k8s.io/kubernetes v%s\n' "$version"
        # shellcheck disable=SC2013 # module paths have no spaces
        for name in $(sed -n 's|^.*=> ./staging/src/||p' "$source/go.mod" | sort -u); do
            printf 'replace %s => %s v0.%s\n' "$name" "$name" "${version#1.}"
        done
    } >"$copy/go.mod"
    (cd "$copy" && nice -n 5 go build -p 2 -mod=mod -trimpath -o "$bin/" \
        -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=v$version -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=$minor" \
        "${@/#/k8s.io/kubernetes/cmd/}") || status=$?
    rm -rf "$copy"
    return $status
}

# module_of PACKAGE@VERSION: prints the module of a command, with its version.
module_of() {
    local path=${1%@*}
    printf '%s@%s' "${path%/cmd/*}" "${1##*@}"
}

# containerd's commands. Since 2.0 its module has another path.
containerd() {
    local module=github.com/containerd/containerd
    case $CONTAINERD in
    1.*) ;;
    *) module+=/v2 ;;
    esac
    go_tool containerd "$CONTAINERD" "-X $module/version.Version=v$CONTAINERD" "$([[ $CONTAINERD != 1.* ]] || echo no_btrfs)" \
        $module/cmd/{containerd,ctr,containerd-shim-runc-v2}@v"$CONTAINERD"
}

runc() {
    go_tool runc "$RUNC" "-X main.version=$RUNC" seccomp github.com/opencontainers/runc@v"$RUNC"
}

crictl() {
    go_tool crictl "$CRICTL" "-X sigs.k8s.io/cri-tools/pkg/version.Version=v$CRICTL" "" sigs.k8s.io/cri-tools/cmd/crictl@v"$CRICTL"
}

helm() {
    go_tool helm "$HELM" "-X helm.sh/helm/v3/internal/version.version=v$HELM" "" helm.sh/helm/v3/cmd/helm@v"$HELM"
}

# kubernetes_tool NAME COMMAND…: builds commands of Kubernetes, as go_tool does.
kubernetes_tool() {
    local name=$1 dir="$CACHE/tools/$1-$KUBERNETES"
    shift
    if [[ ! -d $dir/bin ]]; then
        command -v go >/dev/null || die "building $name $KUBERNETES needs the go toolchain (https://go.dev/dl)"
        say "building $name $KUBERNETES into $dir (3 to 25 minutes on two cores, once)"
        rm -rf "$dir.partial"
        mkdir -p "$dir.partial/bin" "$dir"
        go_build_kubernetes "$dir.partial/bin" "$KUBERNETES" "$@" >&2 || die "could not build $name $KUBERNETES"
        mv -T "$dir.partial/bin" "$dir/bin"
        rmdir "$dir.partial"
    fi
    printf '%s\n' "$dir/bin"
}

kubernetes() { kubernetes_tool kubernetes kubelet kube-apiserver kubectl; }

apiserver() { kubernetes_tool apiserver kube-apiserver; }

controllers() { kubernetes_tool controllers kube-controller-manager; }

# runsc enters a root without libraries, so it must be static.
gvisor() {
    local module=gvisor.dev/gvisor bin
    bin=$(CGO_ENABLED=0 go_tool gvisor "$GVISOR" "-X $module/runsc/version.version=$GVISOR" "" $module/{runsc,shim}@v"$GVISOR") || return
    # containerd finds a shim by this name.
    [[ ! -e $bin/shim ]] || mv "$bin/shim" "$bin/containerd-shim-runsc-v1"
    printf '%s\n' "$bin"
}

# dockerd looks for docker-init (tini, which must run in any image) beside itself and on PATH.
docker() {
    local moby=github.com/moby/moby/v2 cli=github.com/docker/cli bin tini
    bin=$(CGO_ENABLED=0 go_tool moby "$MOBY" "-X $moby/dockerversion.Version=$MOBY" "exclude_graphdriver_btrfs no_btrfs" \
        $moby/cmd/{dockerd,docker-proxy}@v"$MOBY") || return
    if [[ ! -e $bin/docker-init ]]; then
        tini=$(debian_program tini usr/bin/tini-static) || return
        install -m 0755 "$tini" "$bin/docker-init"
    fi
    printf '%s\n' "$bin"
    CGO_ENABLED=0 go_tool docker "$DOCKER" "-X $cli/cli/version.Version=$DOCKER" "" $cli/cmd/docker@v"$DOCKER+incompatible"
}

# CRI-O looks for pinns, a C program of its module, and for conmon, which runs the containers of its OCI runtimes. copyimg, of its own tests, gives
# it images without a registry.
crio() {
    local module=github.com/cri-o/cri-o bin source copy conmon
    bin=$(GO_IN_COPY=1 go_tool crio "$CRIO" "" "containers_image_openpgp exclude_graphdriver_btrfs seccomp" $module/{cmd/crio,test/copyimg}@v"$CRIO") || return
    if [[ ! -e $bin/pinns ]]; then
        source=$(go mod download -json $module@v"$CRIO" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
        copy=$(mktemp -d)
        gcc -O2 -std=c99 -o "$copy/pinns" "$source"/pinns/src/*.c || die "could not build pinns of CRI-O $CRIO"
        conmon=$(debian_program conmon usr/bin/conmon) || return
        install -m 0755 "$conmon" "$bin/conmon"
        install -m 0755 "$copy/pinns" "$bin/pinns"
        rm -rf "$copy"
    fi
    printf '%s\n' "$bin"
}

# One lock for each version: building another one takes minutes, and no one else has to wait for that.
(($#)) || set -- containerd runc
for tool in "$@"; do
    case $tool in
    containerd) with_lock "$CACHE/tools/.lock-containerd-$CONTAINERD" containerd ;;
    runc) with_lock "$CACHE/tools/.lock-runc-$RUNC" runc ;;
    crictl) with_lock "$CACHE/tools/.lock-crictl-$CRICTL" crictl ;;
    helm) with_lock "$CACHE/tools/.lock-helm-$HELM" helm ;;
    kubernetes) with_lock "$CACHE/tools/.lock-kubernetes-$KUBERNETES" kubernetes ;;
    apiserver) with_lock "$CACHE/tools/.lock-apiserver-$KUBERNETES" apiserver ;;
    controllers) with_lock "$CACHE/tools/.lock-controllers-$KUBERNETES" controllers ;;
    docker) with_lock "$CACHE/tools/.lock-docker-$MOBY-$DOCKER" docker ;;
    crio) with_lock "$CACHE/tools/.lock-crio-$CRIO" crio ;;
    gvisor) with_lock "$CACHE/tools/.lock-gvisor-$GVISOR" gvisor ;;
    *) die "no tool '$tool': containerd, runc, crictl, helm, kubernetes, apiserver, controllers, docker, crio or gvisor" ;;
    esac
done
