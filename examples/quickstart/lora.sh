# Sourced by run.sh and finetune_quickstart_ptd.sh with LORA=1, from the checkout's root: the model that LoRA starts from,
# and what is checked afterwards.
# shellcheck shell=bash

MM_BASE=runs/quickstart_base

# Pretrain on the digits 0 to 4, once: a base that is there is taken.
mm_lora_base() {
    if [ ! -f "$MM_BASE/report.json" ]; then
        LORA=base LOAD_PATH="" MASTER_PORT="$MASTER_PORT" bash examples/quickstart/finetune_quickstart.sh
        python examples/quickstart/evaluate.py --run "$MM_BASE" --data runs/quickstart/data
    fi
}

# Evaluate adapters and compare them with PEFT. Argument: the run folder.
mm_lora_check() {
    python examples/quickstart/evaluate.py --run "$1" --data runs/quickstart/data --at-least "${AT_LEAST:-0.9}"
    python examples/quickstart/check_lora.py --run "$1" --base "$MM_BASE" --data runs/quickstart/data
}
