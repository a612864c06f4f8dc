#!/usr/bin/env bash
# Train Wan2.1-T2V-14B with FSDP2 on features of captioned clips, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/wan2.1
HF_PATH=${HF_PATH:-./ckpt/hf_path/Wan2.1-T2V-14B-Diffusers}
DATA_PATH=${DATA_PATH:-./data/sora_features}
MM_MODEL=${MM_MODEL:-$EXAMPLE/model_t2v.json}
MM_DATA=${MM_DATA:-$EXAMPLE/feature_data.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/wan2_1_t2v_14b}
source examples/sora_common.sh

MBS=1
GRAD_ACC_STEP=1

mm_train_sora \
    --lr 1.0e-5 \
    --min-lr 1.0e-5 \
    "$@"
