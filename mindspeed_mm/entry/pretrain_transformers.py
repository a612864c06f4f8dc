"""Train a transformers model (Qwen2.5-VL, Qwen3, …) as its launch script, model.json and data.json describe it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import mindspeed_mm.utils.startup  # noqa: F401  (before what takes long to import)
from mindspeed_mm import accelerator
from mindspeed_mm.configs.global_args import get_args
from mindspeed_mm.data.counting import drop_host_fields
from mindspeed_mm.data.providers import data_json_provider
from mindspeed_mm.models.transformers.adapters import find_adapter
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.training import pretrain
from mindspeed_mm.utils.device import move_to_device


def model_provider(*args: Any, **kwargs: Any) -> TransformersModel:
    """Build the model."""
    return TransformersModel(deepcopy(get_args().mm.model))


def get_batch(data_iterator: Any, model: TransformersModel) -> dict[str, Any]:
    """Take the next micro-batch; target positions are found on the host, before anything is moved."""
    batch = dict(next(data_iterator))
    drop_host_fields(batch)
    return move_to_device(model.prepare(batch), accelerator.current().device())


def loss_func(output: dict[str, Any]) -> Any:
    """(sum, denominator, metrics), or (mean, metrics) for the loss types that are means of micro-batches."""
    if output["denominator"] is None:
        return output["loss"], output["metrics"]
    return output["loss"], output["denominator"], output["metrics"]


def forward_step(data_iterator: Any, model: TransformersModel) -> tuple[dict[str, Any], Any]:
    """Forward pass of one micro-batch."""
    return model(**get_batch(data_iterator, model)), loss_func


def train_valid_test_datasets_provider() -> tuple[Any, Any, None]:
    """Build the loaders that data.json describes."""
    args = get_args()
    return data_json_provider(args, find_adapter(args.mm.model))


model_provider.reads_model_json = "language"  # type: ignore[attr-defined]
model_provider.backends = ("fsdp2",)  # type: ignore[attr-defined]
train_valid_test_datasets_provider.reads_data_json = "language"  # type: ignore[attr-defined]


def main() -> None:
    """Train as the command line says."""
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step_func=forward_step)


if __name__ == "__main__":
    main()
