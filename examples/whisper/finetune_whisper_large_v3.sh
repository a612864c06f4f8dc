#!/usr/bin/env bash
# Train whisper-large-v3 with FSDP2 on speech and its transcripts, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/whisper
HF_PATH=${HF_PATH:-./ckpt/hf_path/whisper-large-v3}
DATA_PATH=${DATA_PATH:-./data/speech.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/whisper_large_v3}
source examples/common.sh

MBS=8
GRAD_ACC_STEP=1
SEQ_LEN=448

mm_train \
    --lr 1.0e-5 \
    --min-lr 1.0e-7 \
    "$@"
