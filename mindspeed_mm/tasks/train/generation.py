"""Training of models that generate images or videos.

The callbacks import what they need when they are called, so that a launch is described before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from mindspeed_mm.configs.global_args import current_run
from mindspeed_mm.configs.recipe import Preparation, Recipe, SampleDrawer
from mindspeed_mm.configs.run import Run
from mindspeed_mm.data.start import DataStart, current_start

if TYPE_CHECKING:
    from mindspeed_mm.backends.protocol import Backend
    from mindspeed_mm.configs.generation_data import GenerationDataConfig
    from mindspeed_mm.data.loading.loader import MMDataLoader
    from mindspeed_mm.models.generation.sora_model import SoRAModel


def model_provider(pre_process: bool = True, post_process: bool = True, *, run: Run | None = None) -> SoRAModel:
    """Build the model; `run`: the description, None: that of the run in this process."""
    from mindspeed_mm.models.generation.sora_model import SoRAModel

    run = run or current_run()
    tokenizers = _data_config(run).dataset_param.tokenizer_dirs
    return SoRAModel(deepcopy(run.files.model), tokenizers, num_microbatches=run.batch.num_microbatches)


def _data_config(run: Run) -> GenerationDataConfig:
    from mindspeed_mm.configs.generation_data import GenerationDataConfig

    return run.data if isinstance(run.data, GenerationDataConfig) else GenerationDataConfig.from_dict(run.files.data)


def get_batch(data_iterator: Iterator[dict[str, Any]], model: SoRAModel) -> dict[str, Any]:
    """Return the next micro-batch, which the frozen parts have encoded to latents and text states."""
    return model.next_batch(data_iterator)


def generation_preparation(backend: Backend, run: Run) -> Preparation:
    """Return what is done with micro-batches in the loader's workers: what is read on the host stays there."""
    from mindspeed_mm.models.generation.sample_encoder import FIRST_FRAMES
    from mindspeed_mm.utils.device import OnHost

    def prepare(batch: dict[str, Any]) -> dict[str, Any]:
        kept = {"sample_keys": OnHost(batch["sample_keys"])}
        if "video" in batch:
            kept[FIRST_FRAMES] = OnHost(batch["video"][:, :, 0].clone())
        return {**batch, **kept}

    return prepare


def loss_func(output: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return (sum over samples, number of samples, metrics)."""
    return output["loss"], output["denominator"], output["metrics"]


def forward_step(data_iterator: Iterator[dict[str, Any]], model: SoRAModel) -> tuple[Any, Callable[..., Any]]:
    """Run the forward pass of one micro-batch."""
    return model(**get_batch(data_iterator, model)), loss_func


def train_valid_test_datasets_provider(
    train_val_test_num_samples: Sequence[int] = (), *, run: Run | None = None, start: DataStart | None = None
) -> tuple[MMDataLoader, MMDataLoader | None, None]:
    """Build the loaders that data.json describes.

    Args:
        train_val_test_num_samples: Megatron's; the loaders have no end.
        run, start: the description, and where the data begin; None: those of the run in this process.
    """
    from mindspeed_mm.configs.sora_config import SoRAModelConfig
    from mindspeed_mm.data.generation.providers import generation_data_provider
    from mindspeed_mm.models.generation.sora_model import generation_rule

    run, start = run or current_run(), start or current_start()
    model = run.model if isinstance(run.model, SoRAModelConfig) else SoRAModelConfig.from_dict(run.files.model)
    return generation_data_provider(run, start, _data_config(run), generation_rule(model, run.process.seed))


def live_samples(run: Run, data: Any) -> SampleDrawer | None:
    """Return what draws samples of prompts while a model is trained; None without --sample-interval."""
    from mindspeed_mm.tasks.generation.live_samples import open_live_samples

    return open_live_samples(run, data)


#: pretrain_sora.py
SORA = Recipe(
    model=model_provider,
    data=train_valid_test_datasets_provider,
    forward_step=forward_step,
    preparation=generation_preparation,
    model_schema="generation",
    data_schema="generation",
    backends=("fsdp2",),
    drawer=live_samples,
)
