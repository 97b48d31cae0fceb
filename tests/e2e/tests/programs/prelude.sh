# shellcheck shell=bash
# Stands before each program's script. What a script prints on stdout must be the same on both runtimes; the rest is for who mends it.
set -euo pipefail
export HOME=/root LC_ALL=C
cd /tmp
# soon COMMAND…: repeats it until it succeeds, for five minutes: emulated guests beside others take their time.
soon() {
    local end=$((SECONDS + 300))
    until "$@" >/tmp/soon 2>&1; do
        ((SECONDS < end)) || { echo "not within 300 s: $*" >&2; cat /tmp/soon >&2; return 1; }
        sleep 0.5
    done
}
