#!/usr/bin/env bash
# Train the model of my_model.py. Run examples/custom_model/prepare.py first, or run.sh, which does everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/common.sh
mm_use_environment
export PYTHONPATH="$MM_ROOT${PYTHONPATH:+:$PYTHONPATH}"

NPUS_PER_NODE=${NPUS_PER_NODE:-2}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
WORLD_SIZE=$((NPUS_PER_NODE * NNODES))
source examples/env_config.sh

MBS=${MBS:-64}
GRAD_ACC_STEP=1
GBS=$((MBS * GRAD_ACC_STEP * WORLD_SIZE))

MM_DATA="./examples/custom_model/data.json"
MM_MODEL=${MM_MODEL:-./examples/custom_model/model.json}
MM_TOOL="./configs/tools.json"
FSDP2_PATH="./examples/custom_model/fsdp2.yaml"
SAVE_PATH="./runs/custom_model"

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank $NODE_RANK \
    --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT
"

GPT_ARGS="
    --use-torch-fsdp2 \
    --fsdp2-config-path $FSDP2_PATH \
    --ckpt-format torch_dcp \
    --untie-embeddings-and-output-weights \
    --micro-batch-size $MBS \
    --global-batch-size $GBS \
    --train-iters ${TRAIN_ITERS:-300} \
    --lr 3.0e-3 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.1 \
    --weight-decay 0.01 \
    --clip-grad 1.0 \
    --num-workers 0 \
    --seed 42
"

MM_ARGS="
    --mm-data $MM_DATA \
    --mm-model $MM_MODEL \
    --mm-tool $MM_TOOL
"

OUTPUT_ARGS="
    --log-interval ${LOG_INTERVAL:-20} \
    --eval-interval 100 \
    --eval-iters 4 \
    --save $SAVE_PATH \
    --save-interval 1000 \
    --save-hf \
    --load $SAVE_PATH
"
# Stop early, with a checkpoint, to go on in another launch.
if [ -n "${EXIT_INTERVAL:-}" ]; then
    OUTPUT_ARGS="$OUTPUT_ARGS --exit-interval $EXIT_INTERVAL"
fi

mkdir -p "$SAVE_PATH"
# shellcheck disable=SC2086
torchrun $DISTRIBUTED_ARGS examples/custom_model/pretrain_mine.py \
    $GPT_ARGS \
    $MM_ARGS \
    $OUTPUT_ARGS \
    --distributed-backend nccl \
    2>&1 | tee -a "$SAVE_PATH/train.log"
