#!/usr/bin/env bash
# Train Qwen2-Audio-7B-Instruct with FSDP2 on sounds and text, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/qwen2audio
HF_PATH=${HF_PATH:-./ckpt/hf_path/Qwen2-Audio-7B-Instruct}
DATA_PATH=${DATA_PATH:-./data/speech.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/qwen2_audio_7b}
source examples/common.sh

MBS=1
GRAD_ACC_STEP=4
SEQ_LEN=2048

mm_train \
    --lr 1.0e-5 \
    --min-lr 1.0e-7 \
    "$@"
