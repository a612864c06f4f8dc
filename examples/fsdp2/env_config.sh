# Environment of launches with train_fsdp2.py, by device; sourced from the checkout's root. See examples/env_config.sh.
# shellcheck shell=bash
source examples/env_config.sh
