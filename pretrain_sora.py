"""Launches call this file by its path; it is `python -m mindspeed_mm.entry.pretrain_sora`."""

from mindspeed_mm.entry.pretrain_sora import main
from mindspeed_mm.tasks.train.generation import (
    forward_step,
    get_batch,
    loss_func,
    model_provider,
    train_valid_test_datasets_provider,
)

__all__ = ["forward_step", "get_batch", "loss_func", "model_provider", "train_valid_test_datasets_provider"]

if __name__ == "__main__":
    main()
