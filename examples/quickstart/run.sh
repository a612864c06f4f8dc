#!/usr/bin/env bash
# The whole quick start: prepare the data, train from scratch, export, evaluate on held-out digits.
# LORA=1: pretrain on the digits 0 to 4 instead, tune adapters on all ten, evaluate, and compare with PEFT.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/common.sh
mm_use_environment sklearn
export PYTHONPATH="$MM_ROOT${PYTHONPATH:+:$PYTHONPATH}"

out=runs/quickstart
python examples/quickstart/prepare.py --out "$out"
MASTER_PORT=${MASTER_PORT:-$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
export MASTER_PORT
if [ -n "${LORA:-}" ]; then
    source examples/quickstart/lora.sh
    mm_lora_base
    bash examples/quickstart/finetune_quickstart.sh
    mm_lora_check runs/quickstart_lora
    exit
fi
bash examples/quickstart/finetune_quickstart.sh
python examples/quickstart/evaluate.py --run "$out" --at-least "${AT_LEAST:-0.95}"
