#!/usr/bin/env bash
# Checks the chart: helm renders it, promtool takes its alerts and the dashboard's queries, and its installer runs on a throw-away node. Needs root,
# for the node's namespaces, and what `make build guest-image` makes.
# usage: test-chart.sh [TEST…]      TEST: for example test_chart.Refuses, or test_rights, which asks a real API server what the chart's accounts
#                                   may do; default: all but that
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
[[ $(id -u) == 0 ]] || die "the installer's node needs root"
python3 -c 'import yaml' 2>/dev/null || die "no YAML in python3: apt-get install python3-yaml"
command -v openssl >/dev/null || die "no openssl: apt-get install openssl"

HELM=$(scripts/tools.sh helm)/helm
CONTAINERD=$(scripts/tools.sh containerd)/containerd
PROMTOOL=$(debian_program prometheus usr/bin/promtool)
SANDBOXER=$ROOT/target/release/sandboxer
export HELM CONTAINERD PROMTOOL SANDBOXER PYTHONDONTWRITEBYTECODE=1
(($#)) || set -- test_chart test_installer
if [[ " $*" == *" test_rights"* ]]; then
    APISERVER=$(scripts/tools.sh apiserver)/kube-apiserver
    ETCD=$(debian_program etcd-server usr/bin/etcd)
    export APISERVER ETCD
fi
cd deploy/tests
# None reaches beyond this host, and no one else reaches their servers.
exec unshare --net bash -c 'ip link set lo up && exec "$@"' tests python3 -m unittest --verbose "$@"
