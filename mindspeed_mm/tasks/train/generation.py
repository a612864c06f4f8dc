"""Training of models that make images or videos.

The callbacks import what they need when they are called, so that a launch is described before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from mindspeed_mm.configs.recipe import Recipe
from mindspeed_mm.configs.run import Run

if TYPE_CHECKING:
    from mindspeed_mm.data.loader import MMDataLoader
    from mindspeed_mm.data.start import DataStart
    from mindspeed_mm.models.sora_model import SoRAModel


def model_provider(run: Run) -> SoRAModel:
    """Build the model."""
    from mindspeed_mm.configs.generation_data import GenerationDataConfig
    from mindspeed_mm.models.sora_model import SoRAModel

    assert isinstance(run.data, GenerationDataConfig), "data.json of a generation model is typed by its schema"
    return SoRAModel(
        deepcopy(run.files.model), run.data.dataset_param.tokenizer_dirs, num_microbatches=run.batch.num_microbatches
    )


def get_batch(data_iterator: Iterator[dict[str, Any]], model: SoRAModel) -> dict[str, Any]:
    """Take the next micro-batch; the frozen parts have made latents and text states of it."""
    return model.next_batch(data_iterator)


def loss_func(output: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """(sum over samples, number of samples, metrics)."""
    return output["loss"], output["denominator"], output["metrics"]


def forward_step(data_iterator: Iterator[dict[str, Any]], model: SoRAModel) -> tuple[Any, Callable[..., Any]]:
    """Forward pass of one micro-batch."""
    return model(**get_batch(data_iterator, model)), loss_func


def train_valid_test_datasets_provider(run: Run, start: DataStart) -> tuple[MMDataLoader, MMDataLoader | None, None]:
    """Build the loaders that data.json describes."""
    from mindspeed_mm.configs.sora_config import SoRAModelConfig
    from mindspeed_mm.data.generation.providers import generation_data_provider
    from mindspeed_mm.models.sora_model import generation_rule

    assert isinstance(run.model, SoRAModelConfig), "model.json of a generation model is typed by its schema"
    return generation_data_provider(run, start, generation_rule(run.model, run.process.seed))


#: pretrain_sora.py
SORA = Recipe(
    model=model_provider,
    data=train_valid_test_datasets_provider,
    forward_step=forward_step,
    model_schema="generation",
    data_schema="generation",
    backends=("fsdp2",),
)
