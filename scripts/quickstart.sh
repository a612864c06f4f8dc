#!/usr/bin/env bash
# From a clean clone to a trained model: makes .venv, prepares the data, trains, exports, evaluates.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

mm_make_venv
mm_activate_venv
exec bash examples/quickstart/run.sh "$@"
