#!/usr/bin/env bash
# The quick start through Megatron-core: tensor parallel over two processes, or with PARALLEL=pp pipeline parallel.
# Prepares the data if nobody has, trains from scratch, exports, evaluates on held-out digits.
# LORA=1 tunes adapters of a model pretrained on the digits 0 to 4 instead, and compares them with PEFT.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/common.sh
mm_use_environment sklearn
export PYTHONPATH="$MM_ROOT${PYTHONPATH:+:$PYTHONPATH}"

NPUS_PER_NODE=${NPUS_PER_NODE:-2}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
WORLD_SIZE=$((NPUS_PER_NODE * NNODES))
MM_ROAD=ptd source examples/env_config.sh

case "${PARALLEL:-tp}" in
    tp) TP=2 PP=1 ;;
    pp) TP=1 PP=2 ;;
    *) echo "PARALLEL is '$PARALLEL'; expected tp or pp" >&2; exit 1 ;;
esac
CP=1
MBS=8
GRAD_ACC_STEP=2
SEQ_LEN=128
DP=$((WORLD_SIZE / TP / PP / CP))
GBS=$((MBS * GRAD_ACC_STEP * DP))

MM_DATA="./examples/quickstart/data.json"
MM_MODEL="./examples/quickstart/model_ptd.json"
MM_TOOL="./configs/tools.json"
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH="./runs/quickstart_ptd"
STEPS=500
LR=1.0e-3
LORA_ARGS=""
if [ -n "${LORA:-}" ]; then
    MM_MODEL="./examples/quickstart/model_lora.json"
    SAVE_PATH="./runs/quickstart_lora_ptd"
    STEPS=400
    LR=4.0e-3
    LORA_ARGS="--lora-target-modules all-linear --lora-r 4 --lora-alpha 16"
fi

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
    --context-parallel-size $CP \
    --use-distributed-optimizer \
    --variable-seq-lengths \
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

[ -f runs/quickstart/data/base.json ] || python examples/quickstart/prepare.py --out runs/quickstart
if [ -n "${LORA:-}" ]; then
    source examples/quickstart/lora.sh
    mm_lora_base
fi
mkdir -p "$SAVE_PATH"
# shellcheck disable=SC2086
mm_start "$SAVE_PATH/train.log" $DISTRIBUTED_ARGS pretrain_vlm.py \
    $GPT_ARGS \
    $MM_ARGS \
    $LORA_ARGS \
    $OUTPUT_ARGS \
    --distributed-backend nccl

if [ -n "${LORA:-}" ]; then
    mm_lora_check "$SAVE_PATH"
    exit
fi
python examples/quickstart/evaluate.py --run "$SAVE_PATH" --data runs/quickstart/data --at-least "${AT_LEAST:-0.95}"
