"""The loaders of a run that trains a generation model."""

from __future__ import annotations

from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.configs.run import Run
from mindspeed_mm.data.generation.build import build_generation_datasets
from mindspeed_mm.data.generation.rule import GenerationRule
from mindspeed_mm.data.loading.loader import MMDataLoader
from mindspeed_mm.data.loading.providers import loaders_of_run
from mindspeed_mm.data.start import DataStart
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice


def generation_data_provider(
    run: Run, start: DataStart, data: GenerationDataConfig, rule: GenerationRule
) -> tuple[MMDataLoader, MMDataLoader | None, None]:
    """Build the training and validation loaders that data.json and the flags describe.

    Args:
        run: the description of the run.
        start: this rank's part of the data, and where the training data begin.
        data: data.json.
        rule: the samples that the model takes.

    Returns:
        (training loader, validation loader or None, None). Micro-batches are those of `collate`.

    Raises:
        ConfigError, DataError: what can't be used, and what to write instead.
    """
    batch = run.batch
    if batch.use_txt_dynamic_batching:
        raise ConfigError("--use-txt-dynamic-batching: clips aren't packed; remove it")
    balances = {
        "use-data-balance": batch.use_data_balance,
        "use-image-mbs-data-balance": batch.use_image_mbs_data_balance,
        "encoder-dp-balance": batch.encoder_dp_balance,
    }
    for flag in (name for name, is_on in balances.items() if is_on):
        notice(f"--{flag} has no effect here: all samples of a global batch have one shape")
    train, valid = build_generation_datasets(data, rule)
    return loaders_of_run(run, start, data.dataloader_param, train, valid)
