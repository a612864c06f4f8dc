"""Train a vision-language or text model (Qwen2.5-VL, Qwen3, …) as its launch script, model.json and data.json say.

Without further flags it is built of Megatron-core's modules (pipeline, tensor and data parallel); with
--use-torch-fsdp2 the transformers model itself is trained.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import mindspeed_mm.utils.startup  # noqa: F401  (before what takes long to import)
from mindspeed_mm import accelerator
from mindspeed_mm.configs.global_args import get_args
from mindspeed_mm.data.counting import drop_host_fields
from mindspeed_mm.data.providers import data_json_provider
from mindspeed_mm.models.common.module import unwrap_model
from mindspeed_mm.models.transformers.adapters import find_adapter
from mindspeed_mm.training import pretrain
from mindspeed_mm.utils.device import move_to_device


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """Build the model, or a pipeline stage's chunk of it."""
    args = get_args()
    if args.use_torch_fsdp2:
        from mindspeed_mm.models.transformers_model import TransformersModel

        return TransformersModel(deepcopy(args.mm.model))
    from mindspeed_mm.models.vlm_model import VLModel

    return VLModel.from_config(deepcopy(args.mm.model), vp_stage)


def get_batch(data_iterator: Any, model: Any) -> dict[str, Any]:
    """Take the next micro-batch; what depends on lengths and positions is found on the host."""
    batch = dict(next(data_iterator))
    drop_host_fields(batch)
    return move_to_device(unwrap_model(model).prepare(batch), accelerator.current().device())


def loss_func(output: dict[str, Any]) -> Any:
    """(sum, denominator, metrics), or (mean, metrics) for the loss types that are means of micro-batches."""
    if output["denominator"] is None:
        return output["loss"], output["metrics"]
    return output["loss"], output["denominator"], output["metrics"]


def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    """Forward pass of one micro-batch; stages before the last return what the next one takes."""
    return model(**get_batch(data_iterator, model)), loss_func


def train_valid_test_datasets_provider() -> tuple[Any, Any, None]:
    """Build the loaders that data.json describes."""
    args = get_args()
    return data_json_provider(args, find_adapter(args.mm.model))


model_provider.reads_model_json = "language"  # type: ignore[attr-defined]
model_provider.backends = ("ptd", "fsdp2")  # type: ignore[attr-defined]
train_valid_test_datasets_provider.reads_data_json = "language"  # type: ignore[attr-defined]


def main() -> None:
    """Train as the command line says."""
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step_func=forward_step)


if __name__ == "__main__":
    main()
