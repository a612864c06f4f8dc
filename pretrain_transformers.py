"""Launches call this file by its path; it is `python -m mindspeed_mm.entry.pretrain_transformers`."""

from mindspeed_mm.entry.pretrain_transformers import main
from mindspeed_mm.tasks.train.language import (
    forward_step,
    get_batch,
    loss_func,
    train_valid_test_datasets_provider,
)
from mindspeed_mm.tasks.train.language import (
    transformers_model_provider as model_provider,
)

__all__ = ["forward_step", "get_batch", "loss_func", "model_provider", "train_valid_test_datasets_provider"]

if __name__ == "__main__":
    main()
