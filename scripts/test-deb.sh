#!/usr/bin/env bash
# Checks the Debian package: equal bytes from two builds, lintian, and its life in a node VM with systemd and a real containerd:
# apt install, a pod, an upgrade under the pod, a removal that is refused, remove, purge, no trace. Prints the time of each step.
# It installs, uses and removes by the commands of docs/first-hour.md, and builds by those too.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
log=$ROOT/target/test-deb.log

# The page's blocks for a machine with a clone: each lies between its comment and the end of the fence.
blocks=$(sed -n '/^<!-- host: /,/^```$/{/^[<`]/d;p}' docs/first-hour.md)
[[ $blocks == *"make deb"* ]] || die "docs/first-hour.md does not say how to build the package"
bash -euxc "$blocks" </dev/null >&2
packages=$(scripts/deb.sh 1)
{ read -r first && read -r bench; } <<<"$packages"
sum=$(sha256sum "$first" "$bench")
[[ $(scripts/deb.sh 1) == "$packages" && $(sha256sum "$first" "$bench") == "$sum" ]] ||
    die "two builds of $first or of $bench have different bytes"
later=$(scripts/deb.sh 2)
later=${later%%$'\n'*}
command -v lintian >/dev/null || die "no lintian: apt-get install lintian"
# Its warnings are printed; errors fail.
lintian --fail-on error --info --allow-root "$first" "$bench"

test=$(cargo test --quiet --no-run --message-format=json -p sandboxer-e2e --test package |
    sed -n 's|.*"executable":"\([^"]*/deps/package-[0-9a-f]*\)".*|\1|p')
[[ -n $test ]] || die "cargo named no test program"
# A node that builds nothing has neither.
crictl=$(scripts/tools.sh crictl)/crictl
scripts/node.sh build "$test" "$first" "$later" "$bench"
status=0
attended scripts/node.sh run --memory 4096 --limit 600 --stall 200 --out "$ROOT/target/test-deb" \
    --program "$crictl" --program "$(command -v make)" \
    -- scripts/node/package.sh "$test" "$first" "$later" "$bench" 2>&1 | tee "$log" || status=$?
((status == 0)) || exit "$status"
# Outside a node the test is ignored.
sed 's/\x1b\[[0-9;]*m//g; s/\r$//' "$log" | grep -q '^test result: ok\. 1 passed; 0 failed; 0 ignored' || die "the test did not run; the output is in $log"
