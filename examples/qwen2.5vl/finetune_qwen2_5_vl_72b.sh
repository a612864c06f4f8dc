#!/usr/bin/env bash
# Train Qwen2.5-VL-72B on the Megatron backend: tensor parallel 8, pipeline parallel 4, on 32 devices.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/common.sh
mm_use_environment

NPUS_PER_NODE=${NPUS_PER_NODE:-8}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
NNODES=${NNODES:-4}
NODE_RANK=${NODE_RANK:-0}
WORLD_SIZE=$((NPUS_PER_NODE * NNODES))
MM_ROAD=ptd source examples/env_config.sh

TP=8
PP=4
CP=1
MBS=1
GRAD_ACC_STEP=64
SEQ_LEN=1024
DP=$((WORLD_SIZE / TP / PP / CP))
GBS=$((MBS * GRAD_ACC_STEP * DP))

MM_DATA="./examples/qwen2.5vl/data_72b.json"
MM_MODEL="./examples/qwen2.5vl/model_72b.json"
MM_TOOL="./configs/tools.json"
LOAD_PATH=${LOAD_PATH:-ckpt/mm_path/Qwen2.5-VL-72B-Instruct}
SAVE_PATH=${SAVE_PATH:-runs/qwen2_5_vl_72b}

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank $NODE_RANK \
    --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT
"

GPT_ARGS="
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size $PP \
    --use-distributed-optimizer \
    --variable-seq-lengths \
    --sequence-parallel \
    --recompute-granularity full \
    --recompute-method block \
    --recompute-num-layers 20 \
    --context-parallel-size $CP \
    --micro-batch-size $MBS \
    --global-batch-size $GBS \
    --seq-length $SEQ_LEN \
    --bf16 \
    --train-iters ${TRAIN_ITERS:-10000} \
    --lr 1.0e-5 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.1 \
    --min-lr 1.0e-7 \
    --weight-decay 0 \
    --clip-grad 1.0 \
    --adam-beta1 0.9 \
    --adam-beta2 0.999 \
    --num-workers 8 \
    --seed 42
"

MM_ARGS="
    --mm-data $MM_DATA \
    --mm-model $MM_MODEL \
    --mm-tool $MM_TOOL
"

OUTPUT_ARGS="
    --log-interval 1 \
    --save-interval 1000 \
    --eval-interval 1000 \
    --eval-iters 10 \
    --save $SAVE_PATH \
    --load $LOAD_PATH
"

mkdir -p "$SAVE_PATH"
# shellcheck disable=SC2086
torchrun $DISTRIBUTED_ARGS pretrain_vlm.py \
    $GPT_ARGS \
    $MM_ARGS \
    $OUTPUT_ARGS \
    --distributed-backend nccl \
    2>&1 | tee -a "$SAVE_PATH/train_rank$NODE_RANK.log"
