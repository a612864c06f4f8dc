#!/usr/bin/env bash
# Train gpt-oss-20b with FSDP2 on text, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/gptoss
HF_PATH=${HF_PATH:-./ckpt/hf_path/gpt-oss-20b-bf16}
DATA_PATH=${DATA_PATH:-./data/conversations.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/gpt_oss_20b}
source examples/common.sh

MBS=1
GRAD_ACC_STEP=4
SEQ_LEN=4096

mm_train \
    --lr 1.0e-5 \
    --min-lr 1.0e-7 \
    "$@"
