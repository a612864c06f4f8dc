#!/usr/bin/env bash
# The whole generation quick start: prepare data, train on captioned digits, make a hundred of them, let a classifier
# read them; then a short text-to-video run on features of moving digits.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/common.sh
mm_use_environment sklearn
export PYTHONPATH="$MM_ROOT${PYTHONPATH:+:$PYTHONPATH}"
started=$(date +%s)

NPUS_PER_NODE=${NPUS_PER_NODE:-2}
out=runs/quickstart_sora
# What an earlier run left: this one starts from scratch.
rm -rf "$out"

free_port() {
    python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

# Sample in as many processes as train. Arguments: those of inference_sora.py.
sample() {
    torchrun --nproc_per_node "$NPUS_PER_NODE" --master_addr localhost --master_port "$(free_port)" \
        inference_sora.py --guidance-scale 2 --num-inference-steps 30 "$@"
}

python examples/quickstart_sora/prepare.py --out "$out"

echo "== captioned digits"
MASTER_PORT=$(free_port) SAVE_PATH="$out/images_run" bash examples/quickstart_sora/train_sora.sh
sample --mm-model examples/quickstart_sora/model.json --load "$out/images_run" \
    --prompts "$out/prompts.txt" --save-path "$out/samples" --size 1 8 8 --batch-size 50
python examples/quickstart_sora/evaluate.py --run "$out" --started "$started" --at-least "${AT_LEAST:-0.9}"

echo "== moving digits: decoded and encoded once, then learnt"
python -m mindspeed_mm.tools.cli data extract-features --mm-model examples/quickstart_sora/model_video.json \
    --mm-data examples/quickstart_sora/data_video.json --output "$out/clip_features" --micro-batch-size 50
MASTER_PORT=$(free_port) SAVE_PATH="$out/clips_run" MBS=32 TRAIN_ITERS=${VIDEO_ITERS:-400} \
    MM_MODEL=examples/quickstart_sora/model_video.json MM_DATA=examples/quickstart_sora/data_features.json \
    bash examples/quickstart_sora/train_sora.sh
sample --mm-model examples/quickstart_sora/model_video.json --load "$out/clips_run" \
    --prompts "$out/prompts_video.txt" --save-path "$out/clip_samples" --size 5 16 16 --fps 4 --batch-size 4

# The time of everything, the moving digits included.
python - "$out/report.json" "$started" <<'EOF_PYTHON'
import json, sys, time
from pathlib import Path

file = Path(sys.argv[1])
report = {**json.loads(file.read_text(encoding="utf-8")), "seconds": round(time.time() - float(sys.argv[2]), 1)}
file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
print(json.dumps(report))
EOF_PYTHON
