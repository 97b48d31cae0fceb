#!/usr/bin/env bash
# Makes a node with a usable KVM, on a host that has none: a Debian VM that QEMU emulates, including AMD's SVM, so guests in it
# use KVM. See `--help`.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

usage() {
    cat <<'HELP'
usage: scripts/node.sh build [FILE…]
       scripts/node.sh run [OPTIONS] -- COMMAND [ARGUMENT…]
       scripts/node.sh shell [OPTIONS]

build makes the files of a node: a Debian root and kernels (into the cache, some minutes, once), and the payload: this
clone as it is built now, with the named FILEs of it (such as test programs).
run boots a node and runs COMMAND in it, in the clone's directory, at the same path as here. It prints COMMAND's output
and exits with its exit code. Each node begins clean. Only files that COMMAND wrote to $NODE_OUT remain.
shell does the same with an interactive shell.

options:
  --cpus N            processors (default 2; 1 in virtual time)
  --memory MIB        memory (default 4096; 6144 in virtual time)
  --numa N            number of NUMA nodes, with equal shares of processors and memory
  --virtual-time      one instruction takes one nanosecond, and a sleep only its own time: figures repeat. One processor
  --kernel NAME       stable (Debian's, the default) or backports (newer, with a newer Landlock)
  --append WORDS      further words on the kernel's command line, such as kvm_amd.npt=0
  --disk MIB          an additional disk, mounted at /disk
  --out DIR           where $NODE_OUT is on this host (default target/node/out)
  --env NAME[=VALUE]  a variable for COMMAND; without a value, as it is here
  --program FILE      put this program into the node's /usr/local/bin; may be repeated
  --limit SECONDS     end the node after this time (default 900)
  --stall SECONDS     end the node after this processor time without output of COMMAND

CLOUD_HYPERVISOR and FIRECRACKER, if set, name further VMMs for the node, JAILER Firecracker's jailer.
The node is emulated by the QEMU of `make emulator`, if it is built, else by qemu-system-x86_64, which may lose a guest;
SANDBOXER_NODE_QEMU names another one.

exit codes: COMMAND's own; 124: limit reached; 125: the node cannot run COMMAND; 123: COMMAND stalled.

examples:
  scripts/node.sh run -- sandboxer-cli check
  scripts/node.sh run --virtual-time --limit 1800 -- scripts/node/bench.sh
HELP
}

# Debian's, unless the mended one is built (make emulator).
QEMU=${SANDBOXER_NODE_QEMU:-$("$ROOT/scripts/node/emulator.sh" built || echo qemu-system-x86_64)}
PAYLOAD=$ROOT/target/node/payload.erofs

cpus='' memory='' numa=0 virtual=no kernel=stable append='' disk=0 out=$ROOT/target/node/out limit=900 stall=0
variables=() programs=()

# refuse WHY: exits because the node cannot run the command.
refuse() {
    say "$*"
    exit 125
}

options() {
    while (($#)); do
        case $1 in
        --) shift && break ;;
        --virtual-time) virtual=yes && shift && continue ;;
        --cpus | --memory | --numa | --kernel | --append | --disk | --out | --env | --program | --limit | --stall)
            (($# > 1)) || refuse "$1 needs a value (see --help)"
            ;;
        *) refuse "unknown option '$1' (see --help; COMMAND comes after --)" ;;
        esac
        case $1 in
        --cpus | --memory | --numa | --disk | --limit | --stall)
            [[ $2 =~ ^[0-9]{1,7}$ ]] || refuse "$1 '$2' is no number"
            # Not octal.
            declare -g "${1#--}=$((10#$2))"
            [[ $1 == --numa || $1 == --disk || $1 == --stall ]] || ((10#$2)) || refuse "$1 0: a node needs at least 1"
            ;;
        --kernel) [[ $2 == stable || $2 == backports ]] || refuse "--kernel '$2': stable or backports" && kernel=$2 ;;
        --append) append+=" $2" ;;
        --out) out=$(realpath -m "$2") ;;
        --env) variables+=("$2") ;;
        --program) programs+=("$2") ;;
        esac
        shift 2
    done
    command=("$@")
    [[ -n $cpus ]] || { [[ $virtual == yes ]] && cpus=1 || cpus=2; }
    [[ -n $memory ]] || { [[ $virtual == yes ]] && memory=6144 || memory=4096; }
    [[ $virtual == no || $cpus == 1 ]] || refuse "virtual time has one processor: leave --cpus out"
    ((numa == 0 || (numa <= cpus && cpus % numa == 0))) || refuse "--numa $numa: --cpus must be a multiple of it"
}

check_host() {
    local available
    command -v "$QEMU" >/dev/null || refuse "no $QEMU: apt-get install qemu-system-x86"
    [[ -f $PAYLOAD ]] || refuse "no $PAYLOAD: run 'make node' first"
    available=$(awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)
    ((available >= memory + 512)) ||
        refuse "$available MiB of memory are available and the node needs $memory + 512: end something or give a smaller --memory"
}

# The control directory: the node's command, and its result.
control() {
    local variable name vmm
    mkdir -p "$work/ctl/bin" "$out"
    printf '%s' "$ROOT" >"$work/ctl/root"
    : >"$work/ctl/env"
    for vmm in CLOUD_HYPERVISOR FIRECRACKER JAILER; do
        [[ -n ${!vmm:-} ]] || continue
        [[ -x ${!vmm} ]] || refuse "$vmm=${!vmm} is no program"
        name=$(tr '[:upper:]_' '[:lower:]-' <<<"$vmm")
        cp -L "${!vmm}" "$work/ctl/bin/$name"
        printf '%s=/usr/local/bin/%s\n' "$vmm" "$name" >>"$work/ctl/env"
    done
    for variable in "${programs[@]}"; do cp -L "$variable" "$work/ctl/bin/" || refuse "cannot copy $variable"; done
    for variable in "${variables[@]}"; do
        name=${variable%%=*}
        [[ $variable == *=* ]] || variable="$name=${!name:-}"
        printf '%s=%q\n' "$name" "${variable#*=}" >>"$work/ctl/env"
    done
    printf '%s %s' "$(tput lines 2>/dev/null || echo 24)" "$(tput cols 2>/dev/null || echo 80)" >"$work/ctl/size"
    printf '%q ' "${command[@]}" >"$work/ctl/command"
}

# share TAG DIR: adds a directory of this host.
share() {
    arguments+=(-fsdev "local,id=$1,path=$2,security_model=none,multidevs=remap" -device "virtio-9p-pci,fsdev=$1,mount_tag=$1")
}

# vm MODE CHARDEV: sets QEMU's arguments.
# shellcheck disable=SC2054 # the commas are QEMU's
vm() {
    local words="console=ttyS0 quiet panic=-1 no_timer_check tsc=reliable mitigations=off random.trust_cpu=on node.mode=$1$append"
    local model=max,la57=off n
    arguments=(-name "sandboxer-node" -machine q35,vmport=off,i8042=off -nodefaults -no-user-config -no-reboot -display none
        -smp "$cpus" -m "$memory" -serial "file:$work/console" -monitor "unix:$work/monitor,server=on,wait=off"
        -device virtio-rng-pci -device virtio-serial-pci -chardev "$2" -device virtconsole,chardev=io
        -drive "file=$image/root.erofs,format=raw,if=none,id=root,readonly=on" -device virtio-blk-pci,drive=root
        -drive "file=$PAYLOAD,format=raw,if=none,id=payload,readonly=on" -device virtio-blk-pci,drive=payload)
    share ctl "$work/ctl"
    share out "$out"
    if ((disk)); then
        truncate -s "${disk}M" "$work/disk"
        arguments+=(-drive "file=$work/disk,format=raw,if=none,id=disk,cache=unsafe,discard=unmap" -device virtio-blk-pci,drive=disk)
    fi
    for ((n = 0; n < numa; n++)); do
        arguments+=(-object "memory-backend-ram,id=numa$n,size=$((memory / numa))M"
            -numa "node,memdev=numa$n,cpus=$((n * cpus / numa))-$(((n + 1) * cpus / numa - 1))")
    done
    if [[ $virtual == yes ]]; then
        # With erms, a repeated instruction counts once per byte. docs/measuring.md says what else is fixed, and why.
        model+=,-erms,-fsrm
        words+=" node.clock=virtual nokaslr norandmaps"
        arguments+=(-accel tcg,thread=single,tb-size=2048 -icount shift=0,sleep=off -rtc base=2026-01-01T00:00:00,clock=vm -seed 1)
    else
        arguments+=(-accel tcg,thread=multi,tb-size=1024)
    fi
    arguments+=(-cpu "$model" -kernel "$image/vmlinuz-$kernel" -initrd "$image/initrd-$kernel" -append "$words")
}

# spent PID: prints its processor time in s, or nothing when it is gone.
spent() {
    local user system
    user=$(stat_field "$1" 14) && system=$(stat_field "$1" 15) && echo $(((user + system) / $(getconf CLK_TCK)))
}

# A guest that Debian's QEMU has lost spins forever, and its node with it. Processor time, unlike time, does not depend on
# other work of this host.
watch_stall() {
    local emulator now before=none since=0 used
    while sleep 5; do
        emulator=$(pgrep -P "$1" | head -n 1) && used=$(spent "$emulator") || return 0
        now=$(stat -c %s "$work/said" 2>/dev/null || true)
        if [[ $now != "$before" ]]; then
            before=$now since=$used
        elif ((used - since >= stall)); then
            : >"$work/stalled"
            kill -TERM "$1" 2>/dev/null || true
            return 0
        fi
    done
}

finish() {
    local status=$?
    trap - EXIT INT TERM HUP
    if [[ -n ${pid:-} ]] && kill -0 "$pid" 2>/dev/null; then
        kill -TERM "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    fi
    [[ -z ${watcher:-} ]] || { pkill -P "$watcher"; kill "$watcher" 2>/dev/null; } || true
    rm -rf --one-file-system "$work"
    exit "$status"
}

# console LINES: prints the last lines of the node's console. If QEMU did not start, there is none.
console() { tail -n "$1" "$work/console" >&2 2>/dev/null || true; }

# boot: runs QEMU to its end, at most $limit s; then reports the command's result.
boot() {
    local status=0
    if [[ $mode == shell ]]; then
        timeout --foreground -k 5 "$limit" "$QEMU" "${arguments[@]}" || status=$?
    else
        timeout -k 5 "$limit" "$QEMU" "${arguments[@]}" </dev/null &
        pid=$!
        ((stall == 0)) || { watch_stall "$pid" & watcher=$!; }
        wait "$pid" || status=$?
    fi
    if [[ -e $work/stalled ]]; then
        say "the command printed nothing in $stall s of processor time; node ended: it hangs, or a guest spins"
        exit 123
    fi
    ((status != 124 && status != 137)) || { say "the node was ended after its limit of $limit s"; console 5; exit 124; }
    [[ ! -f $work/ctl/error ]] || refuse "the node cannot run the command: $(<"$work/ctl/error")"
    [[ -f $work/ctl/status ]] || { console 15; refuse "the node ended before the command (QEMU's exit code is $status); the end of its console is above"; }
    exit "$(<"$work/ctl/status")"
}

node() {
    mode=$1
    shift
    options "$@"
    [[ $mode == shell ]] || ((${#command[@]})) || refuse "no COMMAND (see --help)"
    image=$("$ROOT/scripts/node/image.sh")
    check_host
    work=$(mktemp -d "${TMPDIR:-/tmp}/sandboxer-node.XXXXXX")
    pid=''
    trap finish EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    control
    vm "$mode" "stdio,id=io,signal=off,logfile=$work/said"
    boot
}

case ${1:-} in
build)
    shift
    "$ROOT/scripts/node/image.sh" >/dev/null
    "$ROOT/scripts/node/payload.sh" "$@" >/dev/null
    ;;
run | shell) node "$@" ;;
-h | --help) usage ;;
*)
    usage >&2
    exit 2
    ;;
esac
