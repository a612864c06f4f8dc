# What the launch scripts of examples/<family> share. Sourced from the checkout's root, once these are set:
#
#   EXAMPLE     the example's folder: its model.json, data.json and fsdp2_config.yaml are taken
#   HF_PATH     model directory in the hub's layout
#   DATA_PATH   file with the rows; paths of media in it are relative to its folder
#   LOAD_PATH   run folder to go on from, or empty
#   SAVE_PATH   run folder
#
# mm_train then starts the run. Taken from the environment: NPUS_PER_NODE (processes on this node: one a device),
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, MM_DEVICE (npu, cuda or cpu), TRAIN_ITERS, and the parallel sizes TP
# (tensor), CP (context) and EP (experts; absent: that of fsdp2_config.yaml).
# shellcheck shell=bash

source scripts/common.sh
mm_use_environment
source examples/env_config.sh

# Devices that a process may use: those named as visible, else all of the node; on the host, two processes.
mm_count_devices() {
    local visible="" found=0
    case "$(mm_detect_device)" in
        npu)
            visible=${ASCEND_RT_VISIBLE_DEVICES:-}
            found=$(find /dev -maxdepth 1 -name 'davinci[0-9]*' 2>/dev/null | wc -l)
            ;;
        cuda)
            visible=${CUDA_VISIBLE_DEVICES:-}
            found=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
            ;;
        *) found=2 ;;
    esac
    if [ -n "$visible" ]; then
        found=$(tr ',' '\n' <<<"$visible" | grep -c . || true)
    fi
    if [ "$found" -lt 1 ]; then
        echo "examples/common.sh: the devices of this node can't be counted; say how many: NPUS_PER_NODE=8 bash $0" >&2
        return 1
    fi
    echo "$found"
}

NPUS_PER_NODE=${NPUS_PER_NODE:-$(mm_count_devices)}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
WORLD_SIZE=$((NPUS_PER_NODE * NNODES))

MM_DATA=${MM_DATA:-$EXAMPLE/data.json}
MM_MODEL=${MM_MODEL:-$EXAMPLE/model.json}
MM_TOOL=${MM_TOOL:-configs/tools.json}
FSDP2_PATH=${FSDP2_PATH:-$EXAMPLE/fsdp2_config.yaml}

# The example's model.json and data.json with the script's paths in them, in the run folder: what the run was made of.
mm_write_configs() {
    python - "$1" "$MM_MODEL" "$MM_DATA" "$HF_PATH" "$DATA_PATH" <<'EOF_PYTHON'
import json, os, sys
from pathlib import Path

folder, model_file, data_file, hf_path, data_path = sys.argv[1:]
model, data = (json.loads(Path(file).read_text(encoding="utf-8")) for file in (model_file, data_file))
model["init_from_hf_path"] = data["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = hf_path
rows = {"dataset_dir": str(Path(data_path).parent), "dataset": data_path}
data["dataset_param"]["basic_parameters"].update(rows)
for name, content in (("model", model), ("data", data)):
    path = Path(folder, f"{name}.json")
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(json.dumps(content, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")
    written.replace(path)
EOF_PYTHON
}

# Start as many processes as there are devices. Arguments: the script and its flags.
mm_torchrun() {
    torchrun \
        --nproc_per_node "$NPUS_PER_NODE" \
        --nnodes "$NNODES" \
        --node_rank "$NODE_RANK" \
        --master_addr "$MASTER_ADDR" \
        --master_port "$MASTER_PORT" \
        "$@"
}

# Train. Needs MBS (rows, or packs, that a device takes at once), GRAD_ACC_STEP (how often before the optimizer's step)
# and SEQ_LEN (longest row in tokens). Arguments: further flags; the last one of a name counts.
mm_train() {
    local configs="$SAVE_PATH/configs" load=() experts=()
    mkdir -p "$configs"
    mm_write_configs "$configs"
    if [ -n "${LOAD_PATH:-}" ]; then
        load=(--load "$LOAD_PATH")
    fi
    if [ -n "${EP:-}" ]; then
        experts=(--expert-model-parallel-size "$EP")
    fi
    mm_torchrun pretrain_transformers.py \
        --use-torch-fsdp2 \
        --fsdp2-config-path "$FSDP2_PATH" \
        --init-model-with-meta-device \
        --ckpt-format torch_dcp \
        --tensor-model-parallel-size "${TP:-1}" \
        --pipeline-model-parallel-size 1 \
        --context-parallel-size "${CP:-1}" \
        --micro-batch-size "$MBS" \
        --global-batch-size "$((MBS * GRAD_ACC_STEP * WORLD_SIZE))" \
        --seq-length "$SEQ_LEN" \
        --bf16 \
        --train-iters "${TRAIN_ITERS:-1000}" \
        --lr-decay-style cosine \
        --lr-warmup-fraction 0.1 \
        --weight-decay 0 \
        --clip-grad 1.0 \
        --adam-beta1 0.9 \
        --adam-beta2 0.999 \
        --num-workers 8 \
        --seed 42 \
        --mm-data "$configs/data.json" \
        --mm-model "$configs/model.json" \
        --mm-tool "$MM_TOOL" \
        --log-interval 1 \
        --save "$SAVE_PATH" \
        --save-interval 500 \
        --save-hf \
        --distributed-backend nccl \
        ${load[@]+"${load[@]}"} \
        ${experts[@]+"${experts[@]}"} \
        "$@" \
        2>&1 | tee -a "$SAVE_PATH/train_rank$NODE_RANK.log"
}
