#!/usr/bin/env bash
# Checks dependencies against deny.toml, the scripts, that doc comments name their subject, and that table cells
# of docs/*.md are short.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

scripts=(scripts/*.sh scripts/node/* deploy/tests/*.sh tests/e2e/tests/programs/*.sh .ci/run)
# Run by busybox on a node.
sh_scripts=(deploy/installer/installer deploy/tests/node-double/*)
for script in "${scripts[@]}"; do bash -n "$script"; done
for script in "${sh_scripts[@]}"; do sh -n "$script"; done
shellcheck -x -S warning "${scripts[@]}"
shellcheck -s dash -S warning "${sh_scripts[@]}"

unnamed=$(git ls-files '*.rs' | xargs awk -f scripts/doc-comments.awk)
[[ -z $unnamed ]] || die "doc comments without a subject (a pronoun first, or one word):"$'\n'"$unnamed"

# Pages whose tables are not yet of that form.
long_cells='docs/(compare-kata|compatibility|installing).md'
crowded=$(git ls-files 'docs/*.md' ':!docs/*/*' | grep -vxE "$long_cells" | xargs awk -f scripts/table-cells.awk)
[[ -z $crowded ]] || die "table cells of more than 25 words (write prose or a list below the table):"$'\n'"$crowded"

deny=$(cargo_tool cargo-deny "${CARGO_DENY_VERSION:-0.20.2}")
"$deny" --locked check --hide-inclusion-graph bans licenses sources
# Advisories come from a repository that not every build host can reach.
if "$deny" --locked fetch db 2>/dev/null; then
    "$deny" --locked check --disable-fetch advisories
else
    say "skipped: security advisories (cannot fetch the advisory database)"
fi
