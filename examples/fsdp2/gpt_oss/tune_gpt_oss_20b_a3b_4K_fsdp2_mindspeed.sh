#!/usr/bin/env bash
# Fine-tune gpt-oss-20b as the YAML file beside this script says. Arguments: section.key=value, then flags.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/common.sh
mm_use_environment

NPUS_PER_NODE=${NPUS_PER_NODE:-8}            # devices of a node, one process each
NNODES=${NNODES:-1}                          # nodes; the same command on each, with its own NODE_RANK
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}        # address and free port of the first node
MASTER_PORT=${MASTER_PORT:-6499}
source examples/fsdp2/env_config.sh

torchrun \
    --nproc_per_node "$NPUS_PER_NODE" \
    --nnodes "$NNODES" \
    --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" \
    --master_port "$MASTER_PORT" \
    train_fsdp2.py examples/fsdp2/gpt_oss/tune_gpt_oss_20b_a3b_4K_fsdp2.yaml "$@"
