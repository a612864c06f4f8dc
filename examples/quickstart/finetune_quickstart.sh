#!/usr/bin/env bash
# Train the quick start's model. Run examples/quickstart/prepare.py first, or run.sh, which does everything.
# LORA=base trains the model that LoRA starts from, on the digits 0 to 4; LORA=1 tunes adapters of it on all digits.
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

TP=1
PP=1
CP=1
MBS=4
GRAD_ACC_STEP=2
SEQ_LEN=128
DP=$((WORLD_SIZE / TP / PP / CP))
GBS=$((MBS * GRAD_ACC_STEP * DP))

MM_DATA="./examples/quickstart/data.json"
MM_MODEL="./examples/quickstart/model.json"
MM_TOOL="./configs/tools.json"
FSDP2_PATH="./examples/quickstart/fsdp2.yaml"
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH="./runs/quickstart"
STEPS=500
LR=1.0e-3
LORA_ARGS=""
case "${LORA:-}" in
    "") ;;
    base)
        MM_DATA="./examples/quickstart/data_base.json"
        SAVE_PATH="./runs/quickstart_base"
        STEPS=250
        ;;
    1)
        MM_MODEL="./examples/quickstart/model_lora.json"
        SAVE_PATH="./runs/quickstart_lora"
        STEPS=400
        LR=4.0e-3
        LORA_ARGS="--lora-target-modules all-linear --lora-r 4 --lora-alpha 16"
        ;;
    *) echo "LORA is '$LORA'; expected base or 1" >&2; exit 1 ;;
esac

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
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size $PP \
    --context-parallel-size $CP \
    --micro-batch-size $MBS \
    --global-batch-size $GBS \
    --seq-length $SEQ_LEN \
    --train-iters ${TRAIN_ITERS:-$STEPS} \
    --lr $LR \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.1 \
    --min-lr 1.0e-5 \
    --weight-decay 0.01 \
    --clip-grad 1.0 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --num-workers 1 \
    --seed 42
"

MM_ARGS="
    --mm-data $MM_DATA \
    --mm-model $MM_MODEL \
    --mm-tool $MM_TOOL
"

OUTPUT_ARGS="
    --save-interval 250 \
    --eval-interval 100 \
    --eval-iters 5 \
    --eval-generate exact_match \
    --eval-generate-rows 360 \
    --eval-generate-batch-size 60 \
    --eval-max-new-tokens 8 \
    --save $SAVE_PATH \
    --save-hf
"
if [ -n "$LOAD_PATH" ]; then
    OUTPUT_ARGS="$OUTPUT_ARGS --load $LOAD_PATH"
else
    OUTPUT_ARGS="$OUTPUT_ARGS --overwrite" # a run before this one is replaced
fi

mkdir -p "$SAVE_PATH"
# shellcheck disable=SC2086
mm_start "$SAVE_PATH/train.log" $DISTRIBUTED_ARGS pretrain_transformers.py \
    $GPT_ARGS \
    $MM_ARGS \
    $LORA_ARGS \
    $OUTPUT_ARGS \
    --distributed-backend nccl
