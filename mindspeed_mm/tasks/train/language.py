"""Training of vision-language, speech and text models of transformers.

The callbacks import what they need when they are called, so that a launch is described before torch is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from mindspeed_mm.configs.global_args import current_run
from mindspeed_mm.configs.recipe import Preparation, Recipe
from mindspeed_mm.configs.run import Run
from mindspeed_mm.data.start import DataStart, current_start

if TYPE_CHECKING:
    from torch import nn

    from mindspeed_mm.backends.protocol import Backend
    from mindspeed_mm.configs.recipe import SampleScorer
    from mindspeed_mm.data.loading.loader import MMDataLoader
    from mindspeed_mm.models.transformers_model import TransformersModel


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, *, run: Run | None = None
) -> nn.Module:
    """Build the model; on the Megatron backend a pipeline stage's chunk of it.

    Args:
        pre_process, post_process: whether the stage is the first, the last; the plan of stages knows it by itself.
        vp_stage: number of the chunk; None without interleaving.
        run: the description; None: that of the run in this process.
    """
    run = run or current_run()
    if run.uses_fsdp2:
        return transformers_model_provider(run=run)
    from mindspeed_mm.models.megatron.vlm_model import VLModel

    return VLModel.from_config(deepcopy(run.files.model), vp_stage)


def transformers_model_provider(
    pre_process: bool = True, post_process: bool = True, *, run: Run | None = None
) -> TransformersModel:
    """Build the transformers model with its loss; see `model_provider`."""
    run = run or current_run()
    from mindspeed_mm.models.transformers_model import TransformersModel

    return TransformersModel(deepcopy(run.files.model))


def get_batch(data_iterator: Iterator[dict[str, Any]], model: nn.Module) -> dict[str, Any]:
    """Return the next micro-batch on the device; one that the loader's workers haven't prepared is prepared first."""
    from mindspeed_mm import accelerator
    from mindspeed_mm.data.loading.counting import COUNTS, drop_host_fields
    from mindspeed_mm.models.common.module import unwrap_model
    from mindspeed_mm.utils.device import move_to_device

    batch = dict(next(data_iterator))
    is_prepared = COUNTS in batch
    drop_host_fields(batch)
    if not is_prepared:
        batch = unwrap_model(model).prepare(batch)
    return move_to_device(batch, accelerator.current().device())


def loss_func(output: dict[str, Any]) -> tuple[Any, ...]:
    """Return (sum, denominator, metrics), or (mean, metrics) for the loss types that are means of micro-batches."""
    if output["denominator"] is None:
        return output["loss"], output["metrics"]
    return output["loss"], output["denominator"], output["metrics"]


def forward_step(data_iterator: Iterator[dict[str, Any]], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    """Run the forward pass of one micro-batch; pipeline stages before the last return the input of the next one."""
    return model(**get_batch(data_iterator, model)), loss_func


def preparation(backend: Backend, run: Run) -> Preparation | None:
    """Return what prepares micro-batches in the loader's workers: `prepare` of the model, built without weights."""
    return backend.preparation(functools.partial(model_provider, run=run))


def train_valid_test_datasets_provider(
    train_val_test_num_samples: Sequence[int] = (), *, run: Run | None = None, start: DataStart | None = None
) -> tuple[MMDataLoader, MMDataLoader | None, None]:
    """Build the loaders that data.json describes.

    Args:
        train_val_test_num_samples: Megatron's; the loaders have no end.
        run, start: the description, and where the data begin; None: those of the run in this process.
    """
    run, start = run or current_run(), start or current_start()
    from mindspeed_mm.data.loading.providers import data_json_provider
    from mindspeed_mm.models.transformers.adapters import find_adapter

    return data_json_provider(run, start, find_adapter(run.model or run.files.model))


def answer_scorer(run: Run, valid: Any) -> SampleScorer | None:
    """Return what answers validation rows at each evaluation and scores the answers; None without --eval-generate."""
    from mindspeed_mm.tasks.evaluation.validation_answers import open_validation_answers

    return open_validation_answers(run, valid)


#: pretrain_vlm.py: built of Megatron-core's modules, or with --use-torch-fsdp2 the transformers model itself
VLM = Recipe(
    model=model_provider,
    data=train_valid_test_datasets_provider,
    forward_step=forward_step,
    preparation=preparation,
    model_schema="language",
    data_schema="language",
    backends=("ptd", "fsdp2"),
    scorer=answer_scorer,
)

#: pretrain_transformers.py: the transformers model itself
TRANSFORMERS = Recipe(
    model=transformers_model_provider,
    data=train_valid_test_datasets_provider,
    forward_step=forward_step,
    preparation=preparation,
    model_schema="language",
    data_schema="language",
    backends=("fsdp2",),
    scorer=answer_scorer,
)
