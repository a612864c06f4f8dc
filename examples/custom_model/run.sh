#!/usr/bin/env bash
# A model of one's own, all the way: data, training in two processes, a checkpoint, a second launch that goes on, an export
# that plain torch loads and evaluates; then a transformers class registered from outside, for a few steps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/common.sh
mm_use_environment sklearn
export PYTHONPATH="$MM_ROOT${PYTHONPATH:+:$PYTHONPATH}"
export TRAIN_ITERS=${TRAIN_ITERS:-300}

out=runs/custom_model
# What an earlier run left: this one starts from scratch and would else go on with it.
rm -rf "$out"

free_port() {
    python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

python examples/custom_model/prepare.py --out "$out"

echo "== first launch: sharded as fsdp2.yaml says, stopped half way"
MASTER_PORT=$(free_port) EXIT_INTERVAL=$((TRAIN_ITERS / 2)) bash examples/custom_model/train_mine.sh

echo "== second launch: goes on, sharded as the model's own _fully_shard says"
MASTER_PORT=$(free_port) MM_MODEL=./examples/custom_model/model_own_sharding.json bash examples/custom_model/train_mine.sh

echo "== the export, in plain torch"
python examples/custom_model/evaluate.py --run "$out" --at-least "${AT_LEAST:-0.9}"

echo "== a transformers class, registered by plugin_model.py"
MASTER_PORT=$(free_port) TRAIN_ITERS=${PLUGIN_ITERS:-20} bash examples/custom_model/train_plugin.sh
