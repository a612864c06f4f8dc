#!/usr/bin/env bash
# Train one expert of Wan2.2-T2V-A14B (videos of captions) with FSDP2: EXPERT=high (most noise) or low.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EXAMPLE=examples/wan2.2
EXPERT=${EXPERT:-high}
HF_PATH=${HF_PATH:-./ckpt/hf_path/Wan2.2-T2V-A14B-Diffusers}
DATA_PATH=${DATA_PATH:-./data/clips/captions.jsonl}
MM_MODEL=${MM_MODEL:-$EXAMPLE/model_t2v_a14b_$EXPERT.json}
MM_DATA=${MM_DATA:-$EXAMPLE/data_a14b.json}
LOAD_PATH=${LOAD_PATH:-}
SAVE_PATH=${SAVE_PATH:-./runs/wan2_2_t2v_a14b_$EXPERT}
source examples/sora_common.sh

MBS=1
GRAD_ACC_STEP=1

mm_train_sora \
    --lr 1.0e-5 \
    --min-lr 1.0e-5 \
    "$@"
