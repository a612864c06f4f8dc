#!/usr/bin/env bash
# Train Qwen3-ASR-1.7B-hf with FSDP2 on speech and its transcripts, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/qwen3asr
HF_PATH=${HF_PATH:-./ckpt/hf_path/Qwen3-ASR-1.7B-hf}
DATA_PATH=${DATA_PATH:-./data/speech.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/qwen3_asr_1_7b}
source examples/common.sh

MBS=1
GRAD_ACC_STEP=4
SEQ_LEN=4096

mm_train \
    --lr 1.0e-5 \
    --min-lr 1.0e-7 \
    "$@"
