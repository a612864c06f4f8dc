#!/usr/bin/env bash
# Train llava-1.5-7b-hf with FSDP2 on images and text, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/llava1.5
HF_PATH=${HF_PATH:-./ckpt/hf_path/llava-1.5-7b-hf}
DATA_PATH=${DATA_PATH:-./data/mllm_format_llava_instruct_data.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/llava1_5_7b}
source examples/common.sh

MBS=1
GRAD_ACC_STEP=4
SEQ_LEN=2048

mm_train \
    --lr 1.0e-5 \
    --min-lr 1.0e-7 \
    "$@"
