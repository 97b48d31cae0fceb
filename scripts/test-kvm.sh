#!/usr/bin/env bash
# Runs the tests that need a usable KVM, in node VMs: every VMM with the same cases. Ends with a table of cases by VMM.
# Pods run in real time (docs/decisions/0009-node-vm.md says why), the rest in virtual time: a timeout then counts instructions, and
# other work of this host causes none.
# usage: test-kvm.sh [PHASE…]
#   host       `check`, the daemon's choice, and one pod
#   contract   the daemon's contract with a VMM, for each VMM
#   pods       pods through containerd on each VMM: one case of each kind of those in e2e
#   limits     rate and burst of pods' disks and networks, on each VMM, in virtual time: both exactly
#   unit       the installed unit under a separate systemd that is process 1; SANDBOXER_E2E_RANDOM_KILLS, SANDBOXER_E2E_RANDOM_PODS and
#              UNIT_LIMIT (seconds) make it longer
#   landlock   jails on a kernel with a newer Landlock
#   e2e        pods through containerd on each VMM: all cases with VMM, template, pool, network, volumes, shares, kill -9, recovery
# (default: all but pods, limits and e2e, which take long.) Runs two nodes at a time if there are processors and memory for them.
# CLOUD_HYPERVISOR and FIRECRACKER name VMMs that Debian does not have. Without them their columns are skipped, and counted.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

LOGS=$ROOT/target/test-kvm
# Files of end-to-end cases that touch VMM, template, pool, network, volumes, shares, kill -9 and recovery.
CASES=lifecycle,container::a_container,pool,templates,network,volumes,shares,failure,worker,security
# A selection of these that takes a few minutes: each start path, network, volume, share, kill -9 and recovery.
FEW=templates::a_handler_may_ask_for_a_boot,pool::a_pod_takes_the_pools_vm_if_it_fits,network::pods_reach_one_another
FEW+=,network::who_carries_packets,network::two_interfaces,volumes::files_are_kept_up_to_date,volumes::block_devices,shares::live_both_ways,security::the_jail_is_shown
FEW+=,probe::a_pods_vm_boots_alone,worker::killed_again_and_again,templates::the_next_daemon,failure::vmm_killed
skipped=0
# Rates and bursts. They are measured over many seconds.
LIMITED=bandwidth,scratch::no_faster_than_its_limit
# Processor seconds without output after which a node is ended. The longest case of a sound node takes half of it.
STALL=400
# The clock of the nodes.
clock=(--virtual-time)

# test_programs: builds them; sets vmm_contract, cloud_hypervisor, firecracker and e2e to their paths.
test_programs() {
    local name path
    while read -r name path; do
        declare -g "$name=$path"
        programs+=("$path")
    done < <(cargo test --quiet --no-run --message-format=json -p sandboxer --test vmm_contract --test cloud_hypervisor \
        --test firecracker -p sandboxer-e2e --test e2e | sed -n 's|.*"executable":"\([^"]*/deps/\([a-z0-9_]*\)-[0-9a-f]*\)".*|\2 \1|p')
    [[ -n ${vmm_contract:-} && -n ${cloud_hypervisor:-} && -n ${firecracker:-} && -n ${e2e:-} ]] || die "cargo named no test programs"
}

# in_node LOG LIMIT OPTIONS… -- COMMAND…: runs it beside other nodes, as soon as there is capacity; keeps its output.
in_node() {
    while (($(jobs -rp | wc -l) >= at_once)); do wait -n || true; done
    run_node "$@" &
    # The next one checks the free memory.
    ((at_once == 1)) || sleep 10
}

run_node() {
    local name=$1 log=$LOGS/$1.log limit=$2 status=0 began=$SECONDS
    shift 2
    say "$name begins; its output is $log"
    attended scripts/node.sh run "${clock[@]}" --limit "$limit" --stall "$STALL" --out "$LOGS/out-$name" "$@" >"$log" 2>&1 || status=$?
    say "$name: exit code $status after $((SECONDS - began)) s"
    ((status == 0)) || { printf '%s\n' "$name" >>"$LOGS/failed"; tail -n 40 "$log" >&2; }
}

# Two nodes at once need two processors and memory for two of the larger ones.
nodes_at_once() {
    local available
    available=$(awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)
    if (($(nproc) >= 2 && available >= 2 * 8192 + 2048)); then echo 2; else echo 1; fi
}

# vmms: prints the VMMs to test.
vmms() {
    echo qemu
    [[ -z ${CLOUD_HYPERVISOR:-} ]] || echo cloud-hypervisor
    [[ -z ${FIRECRACKER:-} ]] || echo firecracker
}

skip() {
    say "skipped: $1"
    skipped=$((skipped + 1))
}

host() { in_node host 400 -- scripts/node/kvm-is-usable.sh; }

contract() {
    local accelerated=(--env SANDBOXER_TEST_ACCELERATOR=kvm)
    in_node contract-qemu 600 "${accelerated[@]}" -- "$vmm_contract" --test-threads 1
    if [[ -n ${CLOUD_HYPERVISOR:-} ]]; then
        in_node contract-cloud-hypervisor 600 "${accelerated[@]}" -- "$cloud_hypervisor" --test-threads 1
    fi
    if [[ -n ${FIRECRACKER:-} ]]; then
        in_node contract-firecracker 600 "${accelerated[@]}" -- "$firecracker" --test-threads 1
    fi
}

# pods_on VMM NAME LIMIT CASES
pods_on() {
    local clock=()
    in_node "$2" "$3" --memory 8192 --env STACK_VMM="$1" --env STACK_ACCELERATOR=kvm \
        --env SANDBOXER_E2E_HANDLERS=sandboxer --env SANDBOXER_E2E_ONLY="$4" -- "$e2e"
}

pods() {
    local vmm
    for vmm in $(vmms); do pods_on "$vmm" "pods-$vmm" 1800 "$FEW"; done
}

limits() {
    local vmm
    for vmm in $(vmms); do
        in_node "limits-$vmm" 2400 --env STACK_VMM="$vmm" --env STACK_ACCELERATOR=kvm \
            --env SANDBOXER_E2E_HANDLERS=sandboxer --env SANDBOXER_E2E_ONLY="$LIMITED" -- "$e2e"
    done
}

e2e() {
    local vmm
    for vmm in $(vmms); do pods_on "$vmm" "e2e-$vmm" 5400 "$CASES"; done
}

unit() {
    local asked=() name STALL=$STALL
    for name in SANDBOXER_E2E_RANDOM_KILLS SANDBOXER_E2E_RANDOM_PODS; do
        [[ -z ${!name:-} ]] || asked+=(--env "$name=${!name}")
    done
    # A longer run is one long case, which prints nothing before its end.
    if [[ -n ${UNIT_LIMIT:-} ]]; then
        asked+=(--env "SANDBOXER_E2E_LIMIT=$UNIT_LIMIT")
        STALL=0
    fi
    in_node unit-qemu "${UNIT_LIMIT:-1500}" --memory 4096 --env STACK_VMM=qemu --env STACK_ACCELERATOR=kvm \
        --env SANDBOXER_E2E_HANDLERS=sandboxer "${asked[@]}" --env SANDBOXER_E2E_ONLY=unit -- scripts/node/systemd.sh "$e2e"
}

# Debian 12's own kernel has Landlock version 2. Its backports kernel is for tests that need version 3.
landlock() {
    in_node landlock-qemu 450 --kernel backports --env SANDBOXER_TEST_ACCELERATOR=kvm -- "$vmm_contract" a_vmm_is_jailed
    if [[ -n ${CLOUD_HYPERVISOR:-} ]]; then
        in_node landlock-cloud-hypervisor 450 --kernel backports --env SANDBOXER_TEST_ACCELERATOR=kvm -- "$cloud_hypervisor" --test-threads 1 boots_a_pod
    fi
}

# table: prints the outcome of each case by VMM, from the logs.
table() {
    local logs
    mapfile -t logs < <(find "$LOGS" -name 'contract-*.log' -o -name 'pods-*.log' -o -name 'e2e-*.log' -o -name 'limits-*.log' -o -name 'unit-*.log' -o -name 'landlock-*.log' | sort)
    ((${#logs[@]})) || return 0
    awk '
        FNR == 1 {
            column = FILENAME; sub(".*/", "", column); sub("[.]log$", "", column); newer = column ~ /^landlock/
            sub("^[a-z0-9]*-", "", column); if (newer) column = column "/backports"
            columns[column] = 1; if (length(column) > wide) wide = length(column)
        }
        { gsub("\033[[][0-9;]*m", ""); sub("\r$", "") }
        # Unit tests cover the doubles.
        /^test (double_|suite::|faults::)/ { next }
        /^test .* [.][.][.] (ok|FAILED|ignored)/ {
            name = $0; sub("^test ", "", name); sub(" +[.][.][.] .*", "", name)
            result = $0; sub(".* [.][.][.] ", "", result); sub("[ ,].*", "", result)
            outcome[name, column] = result; names[name] = 1; if (length(name) > width) width = length(name)
        }
        END {
            for (name in names) order[++n] = name
            for (i = 2; i <= n; i++) for (j = i; j > 1 && order[j] < order[j - 1]; j--) { t = order[j]; order[j] = order[j - 1]; order[j - 1] = t }
            printf "%-*s", width, "case"; for (c in columns) printf "  %-*s", wide, c; print ""
            for (i = 1; i <= n; i++) {
                printf "%-*s", width, order[i]
                for (c in columns) printf "  %-*s", wide, ((order[i], c) in outcome) ? outcome[order[i], c] : "-"
                print ""
            }
        }' "${logs[@]}"
}

phases=("$@")
((${#phases[@]})) || phases=(host contract unit landlock)
for phase in "${phases[@]}"; do
    [[ $phase =~ ^(host|contract|pods|limits|unit|landlock|e2e)$ ]] || die "no phase '$phase': host, contract, pods, limits, unit, landlock, e2e"
done
programs=()
rm -rf "$LOGS"
mkdir -p "$LOGS"
test_programs
scripts/node.sh build "${programs[@]}"
[[ -n ${CLOUD_HYPERVISOR:-} ]] || skip "Cloud Hypervisor: set CLOUD_HYPERVISOR to its program, Debian has none"
[[ -n ${FIRECRACKER:-} ]] || skip "Firecracker: set FIRECRACKER to its program, Debian has none"
at_once=$(nodes_at_once)
# Background nodes ignore the terminal's interrupt, so it is passed on.
trap 'trap - EXIT; jobs -rp | xargs -r kill 2>/dev/null; wait' EXIT
trap 'exit 130' INT TERM HUP
for phase in "${phases[@]}"; do "$phase"; done
while [[ -n $(jobs -rp) ]]; do wait -n || true; done
table
failed=$(cat "$LOGS/failed" 2>/dev/null || true)
say "with KVM: ${failed:+failed: ${failed//$'\n'/, }; }$skipped VMMs skipped; the logs are in $LOGS"
[[ -z $failed ]]
