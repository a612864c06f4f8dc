#!/usr/bin/env bash
# Train Qwen3-VL-30B-A3B-Instruct with FSDP2 on images, videos and text, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/qwen3vl
HF_PATH=${HF_PATH:-./ckpt/hf_path/Qwen3-VL-30B-A3B-Instruct}
DATA_PATH=${DATA_PATH:-./data/mllm_format_llava_instruct_data.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/qwen3_vl_30b}
source examples/common.sh

MBS=1
GRAD_ACC_STEP=4
SEQ_LEN=2048

mm_train \
    --lr 1.0e-5 \
    --min-lr 1.0e-7 \
    "$@"
