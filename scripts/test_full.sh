#!/usr/bin/env bash
# Run the whole tables (`pytest -m full`), which scripts/test.sh leaves out, in shards by the name of their folder:
#   bash scripts/test_full.sh              all of them, one after the other
#   bash scripts/test_full.sh parity e2e   these two
# Each shard's closing line and its seconds are printed again at the end.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

shards=("$@")
if [ ${#shards[@]} -eq 0 ]; then
    shards=(unit cases distributed e2e parity)
fi
status=0
lines=()
report="$(mktemp)"
trap 'rm -f "$report"' EXIT
for shard in "${shards[@]}"; do
    if [ ! -d "tests/$shard" ]; then
        echo "tests/$shard is no folder of tests; the shards are: unit cases distributed e2e parity" >&2
        exit 2
    fi
    started=$SECONDS
    bash scripts/test.sh -m full -n 2 "tests/$shard" 2>&1 | tee "$report"
    code=${PIPESTATUS[0]}
    # 5: no test of this folder belongs to the tables
    if [ "$code" -ne 0 ] && [ "$code" -ne 5 ]; then
        status=1
    fi
    lines+=("$shard: $(tail -n 1 "$report" | tr -d =) [$((SECONDS - started)) s in all]")
done
echo
printf '%s\n' "${lines[@]}"
exit $status
