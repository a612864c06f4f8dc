"""Train a model that makes images or videos (Wan, HunyuanVideo, Flux, …) as its launch script and files say."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import mindspeed_mm.utils.startup  # noqa: F401  (before what takes long to import)
from mindspeed_mm.configs.global_args import get_args
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.data.generation.providers import generation_data_provider, tokenizer_directories
from mindspeed_mm.models.sora_model import SoRAModel, generation_rule
from mindspeed_mm.training import pretrain


def model_provider(*args: Any, **kwargs: Any) -> SoRAModel:
    """Build the model."""
    args = get_args()
    return SoRAModel(deepcopy(args.mm.model), tokenizer_directories(args.mm.data))


def get_batch(data_iterator: Any, model: SoRAModel) -> dict[str, Any]:
    """Take the next micro-batch; the frozen parts have made latents and text states of it."""
    return model.ahead.next_batch(data_iterator, get_args().num_microbatches)


def loss_func(output: dict[str, Any]) -> Any:
    """(sum over samples, number of samples, metrics)."""
    return output["loss"], output["denominator"], output["metrics"]


def forward_step(data_iterator: Any, model: SoRAModel) -> tuple[dict[str, Any], Any]:
    """Forward pass of one micro-batch."""
    return model(**get_batch(data_iterator, model)), loss_func


def train_valid_test_datasets_provider() -> tuple[Any, Any, None]:
    """Build the loaders that data.json describes."""
    args = get_args()
    return generation_data_provider(args, generation_rule(SoRAModelConfig.from_dict(args.mm.model), args.seed))


model_provider.reads_model_json = "generation"  # type: ignore[attr-defined]
model_provider.backends = ("fsdp2",)  # type: ignore[attr-defined]
train_valid_test_datasets_provider.reads_data_json = "generation"  # type: ignore[attr-defined]


def main() -> None:
    """Train as the command line says."""
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step_func=forward_step)


if __name__ == "__main__":
    main()
