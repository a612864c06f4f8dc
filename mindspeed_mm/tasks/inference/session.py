"""From a described launch to what answers requests: the encoder of prompts, the model, and the generator over both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_mm import accelerator
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.plugins import import_plugins
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.transformers.adapters import find_adapter
from mindspeed_mm.models.transformers_model import load_hf_config
from mindspeed_mm.tasks.inference.describe import AnswerRun
from mindspeed_mm.tasks.inference.generation import AnswerGenerator
from mindspeed_mm.tasks.inference.loading import add_adapter, load_model
from mindspeed_mm.tasks.inference.prompts import PromptEncoder, PromptSize
from mindspeed_mm.tasks.inference.requests import AnswerRequest
from mindspeed_mm.utils.dtypes import to_torch_dtype
from mindspeed_mm.utils.errors import BadSample, ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def open_prompts(run: AnswerRun) -> PromptEncoder:
    """Load the processor that a launch names, and check that it is the model's.

    Raises:
        ConfigError: it can't be loaded, doesn't belong to the model, or has no chat template.
    """
    import_plugins(run.plugins)
    prompts = PromptEncoder(run.param, find_adapter(described_model(run)))
    prompts.check(hf_config_of(run), f"{run.source.config}/config.json")
    return prompts


def open_generator(run: AnswerRun, prompts: PromptEncoder) -> AnswerGenerator:
    """Load the model that a launch names; with `sharding`, a collective of all processes.

    Raises:
        ConfigError, CheckpointError: the model can't be built, or weights don't belong to it.
    """
    if run.source.adapter is not None and run.sharding is not None:
        raise ConfigError(
            f"'{run.source.adapter}' is a PEFT adapter, which is not sharded; leave --use-torch-fsdp2 out, or shard a "
            "directory that holds the merged weights"
        )
    if run.allow_tf32:
        accelerator.current().allow_tf32()
    model = load_model(
        run.source,
        hf_config_of(run),
        described_model(run),
        dtype=to_torch_dtype(run.dtype),
        sharding=run.sharding,
        trust_remote_code=run.trust_remote_code,
        averaged=run.averaged,
    )
    if run.source.adapter is not None:
        model = add_adapter(model, run.source.adapter, merge=run.merge_adapter)
    elif run.merge_adapter:
        raise ConfigError(f"--merge-adapter: '{run.source.weights}' is no PEFT adapter; leave the flag out")
    return AnswerGenerator(model, prompts, run.settings, lockstep=run.sharding is not None)


def check_length(request: AnswerRequest, size: PromptSize, positions: int | None) -> None:
    """Refuse a prompt that leaves no position for an answer.

    Args:
        positions: of the model; None: any number.

    Raises:
        BadSample: it is too long.
    """
    if positions is not None and size.tokens >= positions:
        raise BadSample(
            f"{request.conversation.where}: the prompt takes {size.tokens} tokens, and the model has {positions} "
            "positions (max_position_embeddings) for prompt and answer together; shorten it, or scale its media down "
            "(--image-max-pixels, --video-maxlen)",
            "longer than the model's positions",
        )


def positions_of(run: AnswerRun) -> int | None:
    """Return the most tokens of prompt and answer together that config.json states; None: it states no number."""
    return positions_in(hf_config_of(run))


def positions_in(hf_config: PretrainedConfig) -> int | None:
    """Return the most tokens of prompt and answer together; None: the configuration states no number."""
    config: Any = hf_config.get_text_config()
    for name in ("max_position_embeddings", "max_target_positions"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    return None


def hf_config_of(run: AnswerRun) -> PretrainedConfig:
    """Return transformers' configuration of the model, with the numbers of a published file that may differ from it.

    Raises:
        ConfigError: config.json can't be read, or has another structure than the file.
    """
    if run.numbers is not None:
        return run.numbers.model_copy(update={"init_from_hf_path": str(run.source.config)}).hf_config()
    with build_context(BuildContext(trust_remote_code=run.trust_remote_code)):
        return load_hf_config(str(run.source.config), run.source.named_by)


def described_model(run: AnswerRun) -> TransformersModelConfig:
    """Return a training's description of the model, or one that says where it is."""
    stated = run.model or TransformersModelConfig(plugin=list(run.plugins))
    return stated.model_copy(update={"init_from_hf_path": str(run.source.config)})
