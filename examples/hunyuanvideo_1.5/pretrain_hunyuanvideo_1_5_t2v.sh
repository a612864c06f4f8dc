#!/usr/bin/env bash
# Train HunyuanVideo-1.5 to make videos of captions with FSDP2, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/hunyuanvideo_1.5
HF_PATH=${HF_PATH:-./ckpt/hf_path/HunyuanVideo-1.5-Diffusers-480p_t2v}
DATA_PATH=${DATA_PATH:-./data/clips/captions.jsonl}
MM_MODEL=${MM_MODEL:-$EXAMPLE/model_t2v.json}
MM_DATA=${MM_DATA:-$EXAMPLE/data.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/hunyuanvideo_1_5_t2v}
source examples/sora_common.sh

MBS=1
GRAD_ACC_STEP=1

mm_train_sora \
    --lr 1.0e-5 \
    --min-lr 1.0e-5 \
    "$@"
