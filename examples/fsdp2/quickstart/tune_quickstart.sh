#!/usr/bin/env bash
# The quick start of train_fsdp2.py: prepare the data, train from scratch, export, ask what was held out.
# Arguments: section.key=value, then flags.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/common.sh
mm_use_environment
export PYTHONPATH="$MM_ROOT${PYTHONPATH:+:$PYTHONPATH}"

NPUS_PER_NODE=${NPUS_PER_NODE:-2}
MASTER_PORT=${MASTER_PORT:-$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
source examples/fsdp2/env_config.sh

out=runs/quickstart_fsdp2
python examples/fsdp2/quickstart/prepare.py --out "$out"
torchrun \
    --nproc_per_node "$NPUS_PER_NODE" \
    --master_addr localhost \
    --master_port "$MASTER_PORT" \
    train_fsdp2.py examples/fsdp2/quickstart/tune_quickstart.yaml \
    "parallel.fsdp_size=$NPUS_PER_NODE" "training.max_steps=${TRAIN_ITERS:-600}" "$@" \
    --overwrite
python examples/fsdp2/quickstart/evaluate.py --run "$out" --at-least "${AT_LEAST:-0.95}"
