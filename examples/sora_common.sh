# What the launch scripts of generation models share. Sourced from the checkout's root, once these are set:
#
#   EXAMPLE     the example's folder
#   MM_MODEL    model.json; MM_DATA: data.json
#   HF_PATH     directory of the whole pipeline, in diffusers' layout
#   DATA_PATH   file with the captioned clips or pictures, their paths relative to its folder; or folder of features
#   LOAD_PATH   run folder to go on from, or empty
#   SAVE_PATH   run folder
#
# mm_train_sora then starts the run. Taken from the environment: what examples/common.sh takes.
# shellcheck shell=bash

source examples/common.sh

# The example's model.json and data.json with the script's paths in them, in the run folder: what the run was made of.
mm_write_sora_configs() {
    python - "$1" "$MM_MODEL" "$MM_DATA" "$HF_PATH" "$DATA_PATH" <<'EOF_PYTHON'
import json, os, sys
from pathlib import Path

folder, model_file, data_file, hf_path, data_path = sys.argv[1:]
model, data = (json.loads(Path(file).read_text(encoding="utf-8")) for file in (model_file, data_file))
written = model.get("init_from_diffusers")


def moved(value):
    """Exchange the directory that the example names, and whatever lies in it, for HF_PATH."""
    if isinstance(value, dict):
        return {key: moved(item) for key, item in value.items()}
    if isinstance(value, list):
        return [moved(item) for item in value]
    if written and isinstance(value, str) and (value == written or value.startswith(written + "/")):
        return hf_path + value[len(written) :]
    return value


rows = {"data_path": data_path}
if data["dataset_param"]["dataset_type"] != "feature":
    rows["data_folder"] = str(Path(data_path).parent)
data["dataset_param"]["basic_parameters"].update(rows)
for name, content in (("model", moved(model)), ("data", data)):
    path = Path(folder, f"{name}.json")
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)
EOF_PYTHON
}

# Train. Needs MBS (samples that a device takes at once) and GRAD_ACC_STEP (how often before the optimizer's step).
# Arguments: further flags; the last one of a name counts.
mm_train_sora() {
    local configs="$SAVE_PATH/configs" load=()
    mkdir -p "$configs"
    mm_write_sora_configs "$configs"
    if [ -n "${LOAD_PATH:-}" ]; then
        load=(--load "$LOAD_PATH")
    fi
    mm_torchrun pretrain_sora.py \
        --use-torch-fsdp2 \
        --fsdp2-config-path "$FSDP2_PATH" \
        --ckpt-format torch_dcp \
        --micro-batch-size "$MBS" \
        --global-batch-size "$((MBS * GRAD_ACC_STEP * WORLD_SIZE))" \
        --bf16 \
        --train-iters "${TRAIN_ITERS:-5000}" \
        --lr-decay-style constant \
        --lr-warmup-iters 100 \
        --weight-decay 1e-2 \
        --clip-grad 1.0 \
        --adam-beta1 0.9 \
        --adam-beta2 0.999 \
        --num-workers 4 \
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
        "$@" \
        2>&1 | tee -a "$SAVE_PATH/train_rank$NODE_RANK.log"
}
