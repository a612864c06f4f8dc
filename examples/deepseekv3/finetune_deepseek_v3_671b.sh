#!/usr/bin/env bash
# Train DeepSeek-V3 with FSDP2 on text, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/deepseekv3
HF_PATH=${HF_PATH:-./ckpt/hf_path/DeepSeek-V3-bf16}
DATA_PATH=${DATA_PATH:-./data/conversations.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/deepseek_v3_671b}
source examples/common.sh

MBS=1
GRAD_ACC_STEP=4
SEQ_LEN=4096

mm_train \
    --lr 1.0e-5 \
    --min-lr 1.0e-7 \
    "$@"
