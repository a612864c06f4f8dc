#!/usr/bin/env bash
# The whole quick start: prepare the data, train from scratch, export, evaluate on held-out digits.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/common.sh
mm_use_environment sklearn
export PYTHONPATH="$MM_ROOT${PYTHONPATH:+:$PYTHONPATH}"

out=runs/quickstart
python examples/quickstart/prepare.py --out "$out"
MASTER_PORT=${MASTER_PORT:-$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
export MASTER_PORT
bash examples/quickstart/finetune_quickstart.sh
python examples/quickstart/evaluate.py --run "$out" --at-least "${AT_LEAST:-0.95}"
