#!/usr/bin/env bash
# Run the test suite in the checkout's own .venv (made on the first call). Arguments go to pytest:
#   bash scripts/test.sh                     the suite that CI runs
#   bash scripts/test.sh tests/unit -k mask  a part of it
# The whole tables (`-m full`) are run by scripts/test_full.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

mm_make_venv
mm_add_trackers
mm_activate_venv

# One thread a process: the distributed tests start several. The suite works without a network and says so to the hub client.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
options=(--durations=30 --durations-min=2)
if [ $# -gt 0 ]; then
    exec python -m pytest "${options[@]}" "$@"
fi

# Two tests at a time, also where a test starts processes of its own: these wait for each other most of the time. Files stay
# whole, as their tests share models and reference runs. Unit tests come first: they say soonest what is broken.
status=0
python -m pytest "${options[@]}" -n 2 --dist loadfile tests/unit || status=$?
python -m pytest "${options[@]}" -n 2 --dist loadfile --ignore=tests/unit || status=$?
exit $status
