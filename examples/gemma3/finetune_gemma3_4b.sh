#!/usr/bin/env bash
# Train gemma-3-4b-it with FSDP2 on images and text, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/gemma3
HF_PATH=${HF_PATH:-./ckpt/hf_path/gemma-3-4b-it}
DATA_PATH=${DATA_PATH:-./data/mllm_format_llava_instruct_data.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/gemma3_4b}
source examples/common.sh

MBS=1
GRAD_ACC_STEP=4
SEQ_LEN=4096

mm_train \
    --lr 1.0e-5 \
    --min-lr 1.0e-7 \
    "$@"
