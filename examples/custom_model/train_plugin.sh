#!/usr/bin/env bash
# Train a transformers class registered by plugin_model.py, or with MM_MODEL=examples/custom_model/model_unregistered.json
# the same architecture without a line of code. Run examples/custom_model/prepare.py first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/common.sh
mm_use_environment
# where model.json's `plugin` is looked for
export PYTHONPATH="$MM_ROOT:$MM_ROOT/examples/custom_model${PYTHONPATH:+:$PYTHONPATH}"

NPUS_PER_NODE=${NPUS_PER_NODE:-2}
MASTER_PORT=${MASTER_PORT:-6000}
source examples/env_config.sh
SAVE_PATH="./runs/custom_model/plugin"

mkdir -p "$SAVE_PATH"
torchrun --nproc_per_node "$NPUS_PER_NODE" --master_port "$MASTER_PORT" pretrain_transformers.py \
    --use-torch-fsdp2 --fsdp2-config-path examples/custom_model/fsdp2_plugin.yaml \
    --ckpt-format torch_dcp --untie-embeddings-and-output-weights \
    --micro-batch-size 8 --global-batch-size $((8 * NPUS_PER_NODE)) --seq-length 64 \
    --train-iters "${TRAIN_ITERS:-20}" --lr 3e-3 --num-workers 0 --log-interval 5 --seed 42 \
    --mm-model "${MM_MODEL:-examples/custom_model/model_plugin.json}" \
    --mm-data examples/custom_model/data_plugin.json --mm-tool configs/tools.json \
    --save "$SAVE_PATH" --overwrite --save-hf --distributed-backend nccl \
    2>&1 | tee -a "$SAVE_PATH/train.log"
