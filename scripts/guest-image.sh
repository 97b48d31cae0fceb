#!/usr/bin/env bash
# Builds the guest image: a kernel from Debian's linux-source package and an initramfs holding only
# the agent. `--help` tells the rest.
set -euo pipefail
shopt -s inherit_errexit

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fragment=$repo/vmm-configs/kernel/sandboxer.config
out=$repo/target/guest
cache=${SANDBOXER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sandboxer}
started=$SECONDS

usage() {
    cat <<HELP
usage: scripts/guest-image.sh [--out DIR] COMMAND

commands:
  kernel              build the kernel, or find it in the cache, and put it at DIR/vmlinux
  initramfs AGENT     pack the static binary AGENT as /init into DIR/initramfs.cpio
  all AGENT           both
  key                 print the key under which the kernel is cached

options:
  --out DIR           where the image goes (default: target/guest in the source tree)
  -h, --help          this text

environment:
  SANDBOXER_KERNEL        take this uncompressed x86-64 vmlinux instead of building one
  SANDBOXER_LINUX_SOURCE  linux-source tarball (default: the newest /usr/src/linux-source-6.*.tar.xz)
  SANDBOXER_CACHE         cache directory (default: \${XDG_CACHE_HOME:-~/.cache}/sandboxer)
  JOBS                    compilers at once (default: all processors)
HELP
}

say() { printf 'guest-image: [%3ds] %s\n' "$((SECONDS - started))" "$*" >&2; }
die() {
    printf 'guest-image: error: %s\n' "$*" >&2
    exit 1
}

# Prints the path of the kernel source tarball.
source_tarball() {
    local found=${SANDBOXER_LINUX_SOURCE:-}
    if [[ -z $found ]]; then
        found=$(find /usr/src -maxdepth 1 -name 'linux-source-6.*.tar.xz' 2>/dev/null | sort -V | tail -n 1)
    fi
    [[ -n $found && -r $found ]] ||
        die "kernel source '${found:-/usr/src/linux-source-6.*.tar.xz}' is not readable; run scripts/install-deps.sh (package linux-source-6.1)"
    printf '%s\n' "$found"
}

# Names each line of fragment $1 that configuration $2 does not fulfil; fails if there is any.
check_config() {
    local line option missing=0
    while IFS= read -r line; do
        case $line in
            CONFIG_*=*)
                grep -qxF -- "$line" "$2" && continue
                ;;
            '# CONFIG_'*' is not set')
                option=${line#\# }
                option=${option%% *}
                grep -q -- "^$option=" "$2" || continue
                ;;
            *) continue ;;
        esac
        option=${line#\# }
        option=${option%%[= ]*}
        printf 'asked for "%s", got "%s"\n' "$line" \
            "$(grep -E -- "^(# )?${option}[= ]" "$2" || echo 'nothing: a dependency is missing')" >&2
        missing=$((missing + 1))
    done <"$1"
    ((missing == 0)) || die "$missing option(s) of ${1#"$repo"/} are not in the kernel configuration (named above)"
}

# Fails unless $1 is an uncompressed x86-64 kernel with a PVH entry point.
check_kernel() {
    local header
    [[ -r $1 ]] || die "kernel '$1' is not readable"
    header=$(readelf -h -- "$1" 2>/dev/null) || die "kernel '$1' is not an ELF file (a vmlinux is needed, not a bzImage)"
    [[ $header == *ELF64* && $header == *X86-64* ]] || die "kernel '$1' is not an x86-64 ELF file"
    # Note type 0x12 of owner Xen is XEN_ELFNOTE_PHYS32_ENTRY, the PVH entry point.
    readelf -n -- "$1" 2>/dev/null | grep -q 'Xen.*0x00000012' ||
        [[ $(readelf -n -- "$1" 2>/dev/null) =~ Xen.*(00000012|PHYS32) ]] ||
        die "kernel '$1' has no PVH entry point (CONFIG_PVH)"
}

# Builds tarball $1 in scratch directory $2; leaves vmlinux, System.map and config in $2/result.
# Its text is part of the cache key, so a change of recipe makes a new kernel.
build_kernel() {
    local tree=$2/linux objects=$2/objects result=$2/result
    # Nothing of the building machine goes into the kernel: equal inputs, equal bytes.
    export KBUILD_BUILD_TIMESTAMP='1970-01-01 00:00:00' KBUILD_BUILD_USER=sandboxer KBUILD_BUILD_HOST=guest
    export KBUILD_BUILD_VERSION=1 LC_ALL=C
    mkdir -p "$tree" "$objects" "$result"
    say "unpacking $1"
    # Without the largest parts that an x86-64 vmlinux cannot need: writing them takes longer than unpacking. Of other processors
    # and drivers only the sources: their Kconfig files and Makefiles are read.
    local part unneeded=()
    for part in 'Documentation/[!K]*/*' tools/{testing,perf}/'*' arch/'[!Kx]*'/'*.'{'[chS]','dts*'} \
        {sound,drivers/{gpu,iio,infiniband,media,net/ethernet,net/wireless,staging,usb}}/'*.[ch]'; do
        unneeded+=(--exclude="linux-source-*/$part")
    done
    tar -xf "$1" -C "$tree" --strip-components=1 --wildcards "${unneeded[@]}"
    make -s -C "$tree" O="$objects" tinyconfig
    "$tree/scripts/kconfig/merge_config.sh" -m -O "$objects" "$objects/.config" "$fragment"
    make -s -C "$tree" O="$objects" olddefconfig
    check_config "$fragment" "$objects/.config" 2>"$2/unmet"
    say "compiling (several minutes on few processors)"
    make -s -C "$tree" O="$objects" -j"${JOBS:-$(nproc)}" vmlinux
    strip -R .comment -o "$result/vmlinux" "$objects/vmlinux"
    cp "$objects/System.map" "$result/System.map"
    cp "$objects/.config" "$result/config"
}

# The key of the kernel: everything that decides its bytes.
kernel_key() {
    {
        sha256sum <"$fragment"
        sha256sum <"$(source_tarball)"
        declare -f build_kernel
        gcc -dumpfullversion -dumpmachine
        ld --version | head -n 1
    } | sha256sum | cut -c 1-32
}

# Prints the path of the kernel, building it unless it is cached.
cached_kernel() {
    local key dir log scratch tarball status=0
    tarball=$(source_tarball)
    key=$(kernel_key)
    dir=$cache/kernel/$key
    log=$cache/kernel/$key.log
    mkdir -p "$cache/kernel"
    # One builder at a time; whoever waited finds the kernel ready.
    exec 9>"$cache/kernel/$key.lock"
    flock -n 9 || {
        say "waiting for another build of the same kernel"
        flock 9
    }
    if [[ -f $dir/vmlinux ]]; then
        say "kernel $key is in the cache"
        printf '%s\n' "$dir/vmlinux"
        return
    fi
    # Left by a build that was killed; the lock says that nobody uses it.
    rm -rf "$cache/kernel/.$key".*
    scratch=$(mktemp -d "$cache/kernel/.$key.XXXXXX")
    # After Ctrl-C a compiler may still write for a moment. Then the second attempt removes the rest.
    # shellcheck disable=SC2064 # the directory is known now and gone from scope later
    trap "rm -rf '$scratch' 2>/dev/null || { sleep 1; rm -rf '$scratch'; }" EXIT
    trap 'exit 130' INT TERM HUP
    say "building kernel $key"
    # A subshell of its own `set -e`: inside `if` or `||` bash would ignore a failing step.
    set +e
    (
        set -e
        build_kernel "$tarball" "$scratch"
    ) 3>&2 >"$log" 2> >(tee -a "$log" | grep --line-buffered '^guest-image:' >&3)
    status=$?
    set -e
    if ((status != 0)); then
        [[ -s $scratch/unmet ]] && cat "$scratch/unmet" >&2 || tail -n 20 "$log" >&2
        die "kernel build failed; its log is $log"
    fi
    check_kernel "$scratch/result/vmlinux"
    mv "$scratch/result" "$dir"
    rm -f "$log"
    say "kernel built: $(du -h "$dir/vmlinux" | cut -f 1)"
    printf '%s\n' "$dir/vmlinux"
}

# Puts file $1 at $2 in one step, so that a reader sees the old or the new one, never a half.
place() {
    local new
    mkdir -p "$(dirname "$2")"
    new=$(mktemp "$2.XXXXXX")
    cp --reflink=auto -- "$1" "$new"
    chmod 0644 "$new"
    mv -f -- "$new" "$2"
}

kernel() {
    local vmlinux
    if [[ -n ${SANDBOXER_KERNEL:-} ]]; then
        vmlinux=$SANDBOXER_KERNEL
        check_kernel "$vmlinux"
        say "taking kernel $vmlinux"
    else
        vmlinux=$(cached_kernel)
    fi
    place "$vmlinux" "$out/vmlinux"
}

initramfs() {
    local agent=$1 root
    [[ -r $agent ]] || die "agent '$agent' is not readable; build it first (make agent)"
    readelf -h -- "$agent" 2>/dev/null | grep -q X86-64 || die "agent '$agent' is not an x86-64 ELF file"
    if readelf -l -- "$agent" | grep -q INTERP; then
        die "agent '$agent' is dynamically linked; nothing but the agent is in the guest, so it must be static"
    fi
    mkdir -p "$out"
    root=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$root'" EXIT
    # The kernel's built-in initramfs brings /dev/console.
    mkdir -m 0755 "$root/dev" "$root/proc" "$root/sys" "$root/run" "$root/newroot"
    install -m 0755 -- "$agent" "$root/init"
    # Same agent, same bytes: a template is keyed by this file's hash.
    find "$root" -exec touch -h -d @0 {} +
    (cd "$root" && printf '%s\n' dev init newroot proc run sys |
        cpio --quiet --reproducible --owner=0:0 -H newc -o) >"$root.cpio"
    place "$root.cpio" "$out/initramfs.cpio"
    rm -rf "$root" "$root.cpio"
    say "initramfs: $(du -h "$out/initramfs.cpio" | cut -f 1)"
}

command=
agent=
while (($# > 0)); do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --out)
            (($# > 1)) || die "--out needs a directory"
            out=$2
            shift
            ;;
        -*) die "unknown option '$1' (see --help)" ;;
        *)
            if [[ -z $command ]]; then
                command=$1
            elif [[ -z $agent ]]; then
                agent=$1
            else
                die "unexpected argument '$1' (see --help)"
            fi
            ;;
    esac
    shift
done

case $command in
    kernel | key) [[ -z $agent ]] || die "'$command' takes no argument" ;;
    initramfs | all) [[ -n $agent ]] || die "'$command' needs the path of the agent binary" ;;
esac
case $command in
    kernel) kernel ;;
    initramfs) initramfs "$agent" ;;
    all)
        kernel
        initramfs "$agent"
        ;;
    key) kernel_key ;;
    '')
        usage >&2
        exit 2
        ;;
    *) die "unknown command '$command' (see --help)" ;;
esac
