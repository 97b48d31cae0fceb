#!/usr/bin/env bash
# Checks that a stack leaves nothing on the host.
#   leftovers.sh record DIR FILE    records the state before the stack in DIR is started
#   leftovers.sh check DIR FILE     prints what exists in addition after the stack was removed; exit 1 if anything
# Mounts, cgroups, loop devices, interfaces and files are compared for the whole host, to find one in an unexpected
# place too. Names of another running stack are left out. Processes are only the stack's own.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
[[ $# == 3 ]] || die "usage: leftovers.sh record|check DIR FILE"
stack_names "$2"

host() {
    local file
    awk '{ print "mount", $5 }' /proc/self/mountinfo
    find /sys/fs/cgroup -type d -printf 'cgroup %p\n' 2>/dev/null || true
    find /run -maxdepth 1 \( -name 'sbx-*' -o -name 'sandboxer*' \) -printf 'file %p\n' 2>/dev/null || true
    find /var/lib/cni -type f -printf 'file %p\n' 2>/dev/null || true
    for file in /sys/block/loop*/loop/backing_file; do [[ ! -r $file ]] || echo "loop device of $(<"$file")"; done
    # What a kubelet uses and sets outside its stack, unless another stack has one.
    if [[ -z $(other_node) ]]; then
        find /var/lib/kubelet /var/log/containers /var/log/pods -printf 'file %p\n' 2>/dev/null || true
        for file in vm.{overcommit_memory,panic_on_oom} kernel.{panic,panic_on_oops}; do echo "sysctl $file=$(sysctl -n "$file")"; done
    fi
    for file in /sys/class/net/*; do echo "network interface ${file##*/}"; done
}

# Prints the names of other running stacks: their directory, run directory, cgroups and network.
other_stacks() {
    local file dir
    for file in /run/sbx-*/dir; do
        dir=$(cat "$file" 2>/dev/null) || continue
        [[ $dir != "$DIR" ]] || continue
        file=${file%/dir}
        printf '%s\n' "$dir" "$file" "sandboxer-${file#/run/sbx-}"
        ls -A "$dir/containerd/runc/k8s.io" 2>/dev/null || true
    done
}

ours() {
    local pid state
    for pid in $(owned_pids); do
        # Killed ones may end at this moment.
        state=$(stat_field "$pid" 3) && [[ $state != [ZX] ]] || continue
        echo "process $pid $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-160)"
    done
    [[ ! -e $DIR ]] || echo "file $DIR"
}

case $1 in
record) host | sort -u >"$3" ;;
check)
    more=$({ host; ours; } | sort -u | comm -13 "$3" - | grep -vF -f <(other_stacks) || true)
    if [[ -n $more ]]; then
        say "left behind:"$'\n'"$more"
        exit 1
    fi
    echo "nothing left behind: processes, mounts, cgroups, sockets, files, loop devices and interfaces are as before"
    ;;
*) die "usage: leftovers.sh record|check DIR FILE" ;;
esac
