#!/usr/bin/env bash
# Train GLM-4.1V-9B-Thinking with FSDP2 on images, videos and text, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/glm4.1v
HF_PATH=${HF_PATH:-./ckpt/hf_path/GLM-4.1V-9B-Thinking}
DATA_PATH=${DATA_PATH:-./data/mllm_format_llava_instruct_data.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/glm4_1v_9b}
source examples/common.sh

MBS=1
GRAD_ACC_STEP=4
SEQ_LEN=2048

mm_train \
    --lr 1.0e-5 \
    --min-lr 1.0e-7 \
    "$@"
