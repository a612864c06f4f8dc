#!/usr/bin/env bash
# Train llava-onevision-qwen2-7b-ov-hf with FSDP2 on images, videos and text, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/llava_onevision
HF_PATH=${HF_PATH:-./ckpt/hf_path/llava-onevision-qwen2-7b-ov-hf}
DATA_PATH=${DATA_PATH:-./data/mllm_format_llava_instruct_data.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/llava_onevision_7b}
source examples/common.sh

MBS=1
GRAD_ACC_STEP=4
SEQ_LEN=8192

mm_train \
    --lr 1.0e-5 \
    --min-lr 1.0e-7 \
    "$@"
