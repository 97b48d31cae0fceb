#!/usr/bin/env bash
# Runs critest, the conformance tests of CRI, on a stack of its own, in a network namespace of its own. What comes of each case must be
# what tests/critest/expected.tsv says.
#   test-critest.sh [HANDLER]          compares; HANDLER (default sandboxer) may be runc, to see what is not ours: it has no list
#   test-critest.sh record [HANDLER]   writes the list anew
# critest must be on PATH; this project does not bring it. Its images come from tests/critest/images.py: no registry is asked.
# CRITEST_ARGUMENTS is added to critest's (for example -ginkgo.focus=…; then nothing is compared). The variables of stack.sh hold here, too.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

PORT=5000
LIST=$ROOT/tests/critest/expected.tsv
verb=compare
[[ ${1:-} != record ]] || { verb=record; shift; }
[[ $# -le 1 ]] || die "usage: test-critest.sh [record] [HANDLER]"
handler=${1:-sandboxer}
[[ -z ${CRITEST_ARGUMENTS:-} && $handler == sandboxer ]] || verb=show

[[ $(id -u) == 0 ]] || die "a stack needs root: it mounts, makes namespaces and cgroups"
command -v critest >/dev/null ||
    die "no critest on PATH: install one of cri-tools' releases; $LIST was made with the version that its first line names"
if [[ ${CRITEST_INSIDE:-} != 1 ]]; then
    set -- "$handler"
    [[ $verb != record ]] || set -- record "$@"
    CRITEST_INSIDE=1 exec unshare --net -- "$0" "$@"
fi

work=$(mktemp -d)
stack=$work/stack
pids=()
end() {
    local status=$?
    trap - EXIT
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    if [[ ${CRITEST_KEEP:-} == 1 ]]; then
        say "kept, as CRITEST_KEEP asks: $work; end it with scripts/stack.sh down $stack"
        exit $status
    fi
    "$ROOT/scripts/stack.sh" down "$stack"
    # Cases that fail leave their mounts.
    awk -v dir="$work/" 'index($5, dir) == 1 { print $5 }' /proc/self/mountinfo | tac | xargs -r umount
    "$ROOT/scripts/leftovers.sh" check "$stack" "$work/before" || status=1
    rm -rf "$work"
    exit $status
}
trap end EXIT
trap 'exit 130' INT TERM HUP

(cd "$ROOT/tests/critest" && PYTHONDONTWRITEBYTECODE=1 python3 -m unittest --quiet test_judge)
ip link set lo up
sysctl -qw net.ipv4.ip_forward=1
"$ROOT/scripts/leftovers.sh" record "$stack" "$work/before"
python3 "$ROOT/tests/critest/images.py" "$PORT" >"$work/registry.log" 2>&1 &
pids+=($!)
for _ in {1..300}; do
    ! (: <"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null || break
    [[ -e /proc/${pids[0]} ]] || die "the registry of the images did not start: $(<"$work/registry.log")"
    sleep 0.1
done
POOL=${POOL:-2} STACK_NETWORK=here STACK_NRI=1 "$ROOT/scripts/stack.sh" up "$stack"
stack_names "$stack"
# Every registry's images are those of ours.
mkdir -p "$DIR/containerd/certs.d/_default"
printf 'server = "http://127.0.0.1:%s"\n[host."http://127.0.0.1:%s"]\n  capabilities = ["pull", "resolve"]\n' "$PORT" "$PORT" \
    >"$DIR/containerd/certs.d/_default/hosts.toml"

# In the order of the files, so that two runs do the same.
arguments=(-runtime-endpoint "unix://$RUN/containerd.sock" -image-endpoint "unix://$RUN/containerd.sock"
    -runtime-handler "$handler" -nri-socket "$RUN/nri.sock"
    -ginkgo.no-color -ginkgo.randomize-all=false -ginkgo.seed=1 -ginkgo.timeout=3h -ginkgo.junit-report="$work/report.xml")
# shellcheck disable=SC2206 # words
arguments+=(${CRITEST_ARGUMENTS:-})
mkdir "$work/tmp"
status=0
TMPDIR=$work/tmp NO_PROXY=127.0.0.1 no_proxy=127.0.0.1 attended critest "${arguments[@]}" >"$work/log" 2>&1 || status=$?
if [[ -n ${CRITEST_LOG:-} ]]; then cp "$work/log" "$CRITEST_LOG"; fi
[[ -s $work/report.xml ]] || { tail -n 40 "$work/log" >&2; die "critest ended with $status and without a report"; }
case $verb in
compare) python3 "$ROOT/tests/critest/judge.py" "$work/report.xml" "$LIST" ;;
record) python3 "$ROOT/tests/critest/judge.py" "$work/report.xml" "$LIST" record ;;
show) python3 "$ROOT/tests/critest/judge.py" "$work/report.xml" "$work/list" record ;;
esac
