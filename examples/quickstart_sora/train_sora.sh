#!/usr/bin/env bash
# Train the generation quick start's model. Run prepare.py first, or run.sh, which does everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/common.sh
mm_use_environment

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

MM_DATA=${MM_DATA:-./examples/quickstart_sora/data.json}
MM_MODEL=${MM_MODEL:-./examples/quickstart_sora/model.json}
MM_TOOL="./configs/tools.json"
FSDP2_PATH="./examples/quickstart_sora/fsdp2.yaml"
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/quickstart_sora/images_run}

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
    --micro-batch-size $MBS \
    --global-batch-size $GBS \
    --train-iters ${TRAIN_ITERS:-320} \
    --lr 2.0e-3 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.02 \
    --min-lr 4.0e-5 \
    --weight-decay 0.01 \
    --clip-grad 1.0 \
    --adam-beta1 0.9 \
    --adam-beta2 0.99 \
    --ema-decay 0.99 \
    --num-workers 1 \
    --seed 42
"

MM_ARGS="
    --mm-data $MM_DATA \
    --mm-model $MM_MODEL \
    --mm-tool $MM_TOOL
"

OUTPUT_ARGS="
    --save-interval 10000 \
    --sample-interval ${SAMPLE_INTERVAL:-80} \
    --sample-inference-steps 30 \
    --sample-guidance-scale 2 \
    --save $SAVE_PATH
"
if [ -n "$LOAD_PATH" ]; then
    OUTPUT_ARGS="$OUTPUT_ARGS --load $LOAD_PATH"
else
    OUTPUT_ARGS="$OUTPUT_ARGS --overwrite" # a run before this one is replaced
fi

mkdir -p "$SAVE_PATH"
# shellcheck disable=SC2086
mm_start "$SAVE_PATH/train.log" $DISTRIBUTED_ARGS pretrain_sora.py \
    $GPT_ARGS \
    $MM_ARGS \
    $OUTPUT_ARGS \
    --distributed-backend nccl
