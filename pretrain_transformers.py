"""Train a transformers model (Qwen2.5-VL, Qwen3, …) as its launch script, model.json and data.json describe it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import mindspeed_mm.utils.startup  # noqa: F401  (before what takes long to import)
from mindspeed_mm import accelerator
from mindspeed_mm.configs.global_args import get_args
from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.training import pretrain
from mindspeed_mm.utils.device import move_to_device


def model_provider(*args: Any, **kwargs: Any) -> TransformersModel:
    """Build the model."""
    return TransformersModel(deepcopy(get_args().mm.model))


def get_batch(data_iterator: Any, model: TransformersModel) -> dict[str, Any]:
    """Take the next micro-batch; target positions are found on the host, before anything is moved."""
    batch = dict(next(data_iterator))
    batch.pop("num_rows", None)
    return move_to_device(model.prepare(batch), accelerator.current().device())


def loss_func(output: dict[str, Any]) -> Any:
    """(sum, denominator, metrics), or (mean, metrics) for the loss types that are means of micro-batches."""
    if output["denominator"] is None:
        return output["loss"], {}
    return output["loss"], output["denominator"], {}


def forward_step(data_iterator: Any, model: TransformersModel) -> tuple[dict[str, Any], Any]:
    """Forward pass of one micro-batch."""
    return model(**get_batch(data_iterator, model)), loss_func


def train_valid_test_datasets_provider() -> tuple[Any, Any, None]:
    """Build the loaders that data.json describes."""
    args = get_args()
    data = args.mm.data
    datasets = build_mm_dataset(data.dataset_param, max_length=args.seq_length, seed=args.seed)
    train, valid = datasets if isinstance(datasets, tuple) else (datasets, None)

    def loader(dataset: Any, *, training: bool) -> Any:
        return build_mm_dataloader(
            dataset,
            data.dataloader_param,
            consumed_samples=args.consumed_train_samples if training else 0,
            micro_batch_size=args.micro_batch_size,
            global_batch_size=args.global_batch_size,
            num_workers=args.num_workers,
            seed=args.seed,
            dp_rank=args.data_parallel_rank,
            dp_size=args.data_parallel_size,
            train=training,
        )

    return loader(train, training=True), loader(valid, training=False) if valid is not None else None, None


model_provider.reads_model_json = True  # type: ignore[attr-defined]
model_provider.backends = ("fsdp2",)  # type: ignore[attr-defined]
train_valid_test_datasets_provider.reads_data_json = True  # type: ignore[attr-defined]

if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step_func=forward_step)
