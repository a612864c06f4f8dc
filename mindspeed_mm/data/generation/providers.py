"""The loaders of a run that trains a generation model."""

from __future__ import annotations

from typing import Any

from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.data.generation.build import build_generation_datasets
from mindspeed_mm.data.generation.rule import GenerationRule
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice


def generation_data_provider(args: Any, rule: GenerationRule) -> tuple[Any, Any, None]:
    """Build the training and validation loaders that data.json (`args.mm.data`) and the flags describe.

    Args:
        args: the run's Namespace, with `data_parallel_rank` and `data_parallel_size`.
        rule: what the model asks of samples.

    Returns:
        (training loader, validation loader or None, None). Micro-batches are those of `collate`.

    Raises:
        ConfigError, DataError: what can't be used, and what to write instead.
    """
    from mindspeed_mm.data import build_mm_dataloader

    if getattr(args, "use_txt_dynamic_batching", False):
        raise ConfigError("--use-txt-dynamic-batching: clips aren't packed; remove it")
    for flag in ("use_data_balance", "use_image_mbs_data_balance", "encoder_dp_balance"):
        if getattr(args, flag, False):
            notice(f"--{flag.replace('_', '-')} has no effect here: all samples of a global batch have one shape")
    config = GenerationDataConfig.from_dict(args.mm.data)
    train, valid = build_generation_datasets(config, rule)

    def loader(dataset: Any, *, training: bool) -> Any:
        return build_mm_dataloader(
            dataset,
            config.dataloader_param,
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


def tokenizer_directories(data: Any) -> list[str | None]:
    """Return the tokenizers' directories that data.json (`args.mm.data`) names, in order; None: one that has none."""
    return GenerationDataConfig.from_dict(data).dataset_param.tokenizer_dirs
