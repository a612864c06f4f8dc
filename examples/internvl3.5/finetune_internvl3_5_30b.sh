#!/usr/bin/env bash
# Train InternVL3_5-30B-A3B-HF with FSDP2 on images, videos and text, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/internvl3.5
HF_PATH=${HF_PATH:-./ckpt/hf_path/InternVL3_5-30B-A3B-HF}
DATA_PATH=${DATA_PATH:-./data/mllm_format_llava_instruct_data.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/internvl3_5_30b}
source examples/common.sh

MBS=1
GRAD_ACC_STEP=4
SEQ_LEN=8192

mm_train \
    --lr 1.0e-5 \
    --min-lr 1.0e-7 \
    "$@"
