#!/usr/bin/env bash
# The tests that want a usable KVM, in node VMs: every VMM that is there against the same cases. Ends with a table, VMM by case.
# In virtual time: a time-out is then one of instructions, and what else this machine does makes none.
# usage: test-kvm.sh [PHASE…]      PHASE: host, contract, e2e, unit, landlock (default: host and contract)
# CLOUD_HYPERVISOR and FIRECRACKER name VMMs that Debian lacks; without them their columns are skipped, and counted.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

LOGS=$ROOT/target/test-kvm
# Files of end-to-end cases that touch VMM, template, pool, network, volumes, shares, kill -9 and recovery.
CASES=lifecycle,container::a_container,pool,templates,network,volumes,shares,failure,worker,security
failed=0 skipped=0

# test_programs: builds them; sets vmm_contract, cloud_hypervisor and e2e to their paths.
test_programs() {
    local name path
    while read -r name path; do
        declare -g "$name=$path"
        programs+=("$path")
    done < <(cargo test --quiet --no-run --message-format=json -p sandboxer --test vmm_contract --test cloud_hypervisor \
        -p sandboxer-e2e --test e2e | sed -n 's|.*"executable":"\([^"]*/deps/\([a-z0-9_]*\)-[0-9a-f]*\)".*|\2 \1|p')
    [[ -n ${vmm_contract:-} && -n ${cloud_hypervisor:-} && -n ${e2e:-} ]] || die "cargo named no test programs"
}

# in_node LOG LIMIT OPTIONS… -- COMMAND…: runs it, keeps and shows its output.
in_node() {
    local log=$LOGS/$1.log limit=$2 status=0 began=$SECONDS
    shift 2
    say "${log##*/}: $(printf '%s ' "${@: -3}")"
    scripts/node.sh run --virtual-time --limit "$limit" --out "$LOGS/out" "$@" 2>&1 | tee "$log" || status=$?
    say "${log##*/}: exit code $status after $((SECONDS - began)) s"
    ((status == 0)) || failed=$((failed + 1))
}

# vmms: those that are there.
vmms() {
    echo qemu
    [[ -z ${CLOUD_HYPERVISOR:-} ]] || echo cloud-hypervisor
}

skip() {
    say "skipped: $1"
    skipped=$((skipped + 1))
}

# `check`, the daemon's choice, and one pod.
host() { in_node host 400 -- scripts/node/kvm-is-usable.sh; }

contract() {
    local accelerated=(--env SANDBOXER_TEST_ACCELERATOR=kvm)
    in_node contract-qemu 420 "${accelerated[@]}" -- "$vmm_contract" --test-threads 1
    if [[ -n ${CLOUD_HYPERVISOR:-} ]]; then
        in_node contract-cloud-hypervisor 420 "${accelerated[@]}" -- "$cloud_hypervisor" --test-threads 1
    fi
}

e2e() {
    local vmm
    for vmm in $(vmms); do
        # Without nested paging: with it, the emulator sometimes delivers an interrupt twice when many guests start.
        in_node "e2e-$vmm" 900 --memory 8192 --append kvm_amd.npt=0 --env STACK_VMM="$vmm" --env STACK_ACCELERATOR=kvm \
            --env SANDBOXER_E2E_HANDLERS=sandboxer --env SANDBOXER_E2E_ONLY="$CASES" -- "$e2e"
    done
}

# The installed unit under a systemd that is process 1 of its own.
unit() {
    in_node unit 600 --memory 4096 --append kvm_amd.npt=0 --env STACK_VMM=qemu --env STACK_ACCELERATOR=kvm --env SANDBOXER_E2E_HANDLERS=sandboxer \
        --env SANDBOXER_E2E_ONLY=unit -- scripts/node/systemd.sh "$e2e"
}

# Debian 12's own kernel has Landlock's second version; what needs the third is seen with the one of its backports.
landlock() {
    in_node landlock-qemu 300 --kernel backports --env SANDBOXER_TEST_ACCELERATOR=kvm -- "$vmm_contract" a_vmm_is_jailed
    if [[ -n ${CLOUD_HYPERVISOR:-} ]]; then
        in_node landlock-cloud-hypervisor 300 --kernel backports --env SANDBOXER_TEST_ACCELERATOR=kvm -- "$cloud_hypervisor" --test-threads 1 boots_a_pod
    fi
}

# table: what each log says of each case, VMM by case.
table() {
    local logs
    mapfile -t logs < <(find "$LOGS" -name 'contract-*.log' -o -name 'e2e-*.log' | sort)
    ((${#logs[@]})) || return 0
    awk '
        FNR == 1 { column = FILENAME; sub(".*/", "", column); sub("[.]log$", "", column); sub("^[a-z0-9]*-", "", column); columns[column] = 1 }
        { gsub("\033[[][0-9;]*m", ""); sub("\r$", "") }
        # What a double does, the units show.
        /^test (double_|suite::|faults::)/ { next }
        /^test .* [.][.][.] (ok|FAILED|ignored)/ {
            name = $0; sub("^test ", "", name); sub(" +[.][.][.] .*", "", name)
            result = $0; sub(".* [.][.][.] ", "", result); sub("[ ,].*", "", result)
            outcome[name, column] = result; names[name] = 1; if (length(name) > width) width = length(name)
        }
        END {
            for (name in names) order[++n] = name
            for (i = 2; i <= n; i++) for (j = i; j > 1 && order[j] < order[j - 1]; j--) { t = order[j]; order[j] = order[j - 1]; order[j - 1] = t }
            printf "%-*s", width, "case"; for (c in columns) printf "  %-16s", c; print ""
            for (i = 1; i <= n; i++) {
                printf "%-*s", width, order[i]
                for (c in columns) printf "  %-16s", ((order[i], c) in outcome) ? outcome[order[i], c] : "-"
                print ""
            }
        }' "${logs[@]}"
}

phases=("$@")
((${#phases[@]})) || phases=(host contract)
programs=()
rm -rf "$LOGS"
mkdir -p "$LOGS"
test_programs
scripts/node.sh build "${programs[@]}"
[[ -n ${CLOUD_HYPERVISOR:-} ]] || skip "Cloud Hypervisor: CLOUD_HYPERVISOR names no program, and Debian has none"
[[ -n ${FIRECRACKER:-} ]] || skip "Firecracker: FIRECRACKER names no program, and Debian has none"
for phase in "${phases[@]}"; do
    case $phase in
    host | contract | e2e | unit | landlock) "$phase" ;;
    *) die "no phase '$phase': host, contract, e2e, unit, landlock" ;;
    esac
done
table
say "with KVM: $failed of the runs failed, $skipped VMMs skipped; the logs are in $LOGS"
((failed == 0))
