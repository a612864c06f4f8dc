#!/usr/bin/env bash
# Train FLUX.1-dev with FSDP2 on captioned pictures, on all devices of this node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/flux
HF_PATH=${HF_PATH:-./ckpt/hf_path/FLUX.1-dev}
DATA_PATH=${DATA_PATH:-./data/pictures/captions.jsonl}
MM_MODEL=${MM_MODEL:-$EXAMPLE/model.json}
MM_DATA=${MM_DATA:-$EXAMPLE/data.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/flux_1_dev}
source examples/sora_common.sh

MBS=1
GRAD_ACC_STEP=1

mm_train_sora \
    --lr 1.0e-5 \
    --min-lr 1.0e-5 \
    "$@"
