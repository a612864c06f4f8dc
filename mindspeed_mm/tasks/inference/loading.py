"""Load a model of transformers for generation: from any source of weights, whole or sharded over the processes."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_mm import accelerator
from mindspeed_mm.checkpoint.adapters import write_peft_files
from mindspeed_mm.checkpoint.dcp import read_state
from mindspeed_mm.checkpoint.lazy import whole
from mindspeed_mm.checkpoint.sources import DcpWeights, WeightSource, is_dcp, open_weights
from mindspeed_mm.checkpoint.start import refuse_damaged
from mindspeed_mm.checkpoint.weights import load_weights
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.attention import set_attention
from mindspeed_mm.models.transformers.meta_model import config_for, keep_in_float32
from mindspeed_mm.tasks.inference.source import ModelSource
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import info_rank0

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def load_model(
    source: ModelSource,
    hf_config: PretrainedConfig,
    described: TransformersModelConfig | None = None,
    *,
    dtype: torch.dtype | None = None,
    sharding: Fsdp2Config | None = None,
    trust_remote_code: bool = False,
    averaged: bool = False,
) -> Any:
    """Build a model and load its weights, each process what it holds of them.

    Args:
        source: where the model is.
        hf_config: its configuration.
        described: model_id and attention kernels of a training's model.json; None: transformers' own choice.
        dtype: of the parameters, but for those that transformers keeps in float32; None: that of config.json on an
            accelerator, float32 on the host.
        sharding: fsdp2.yaml: the parameters are sharded over the processes (a process group exists), and all processes
            must generate in lockstep; None: each process holds the model.
        trust_remote_code: whether code of the directory may be executed.
        averaged: the averages of a checkpoint instead of its weights.

    Returns:
        the transformers model in evaluation mode, on this process's device, with the directory's generation
        configuration.

    Raises:
        ConfigError: config.json can't be used, or the model generates no text.
        CheckpointError: the weights are damaged, or don't belong to the model.
    """
    with build_context(BuildContext(trust_remote_code=trust_remote_code, fsdp2=sharding)):
        model = build_on_meta_device(source, hf_config, described, dtype)
        model.weights_come_later = True
        if sharding is not None:
            model.fsdp2_overrides = {
                "param_dtype": None,
                "output_dtype": None,
                "recompute_modules": [],
                "compile": False,
            }
            model.fully_shard(None, None)
        else:
            model._post_fully_shard()  # storage, and the values of buffers that no file holds
    if is_dcp(source.weights):
        refuse_damaged(source.weights, 0, 1, lambda found: [found], checksums=False)
    weights = _open(source.weights, averaged)
    load_weights(model, weights)
    read_generation_config(model, source.config)
    info_rank0(f"model: {type(model).__name__.removeprefix('FSDP')} of '{source.weights}'")
    return model


def add_adapter(model: Any, directory: Path, *, merge: bool = False) -> Any:
    """Add a PEFT adapter to its base.

    Args:
        model: the base, unsharded.
        directory: a PEFT directory (adapter_config.json, adapter_model.safetensors), or a checkpoint of a run with
            LoRA.
        merge: add the adapter to the base's weights, which makes each token cheaper.

    Raises:
        ConfigError: the adapter doesn't belong to the base.
    """
    from peft import PeftModel

    name = type(model).__name__
    with _as_peft_directory(directory) as place:
        try:
            adapted: Any = PeftModel.from_pretrained(model, str(place))
        except (ValueError, RuntimeError, KeyError, TypeError) as error:
            raise ConfigError(f"'{directory}' can't be added to its base {name}: {error}") from error
    info_rank0(f"adapter: '{directory}'" + (", merged into the base's weights" if merge else ""))
    return adapted.merge_and_unload() if merge else adapted.eval()


@contextmanager
def _as_peft_directory(directory: Path) -> Iterator[Path]:
    """A PEFT directory as it is; of a checkpoint, one with the same adapters, for as long as the context lasts."""
    if not is_dcp(directory):
        yield directory
        return
    tensors = DcpWeights(directory).tensors()
    values = {name.removeprefix("model."): tensor.node.read(whole(tensor.shape)) for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory(prefix="adapter-") as folder:
        write_peft_files(Path(folder), values, read_state(directory)["lora"])
        yield Path(folder)


def build_on_meta_device(
    source: ModelSource,
    hf_config: PretrainedConfig,
    described: TransformersModelConfig | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return the model on the meta device; arguments and errors are those of `load_model`."""
    from transformers.initialization import no_init_weights

    model_id = described.model_id if described is not None else None
    model_class: Any = ModelHub.get(model_id, hf_config, where=f"{source.config}/config.json")
    hf_config = copy.deepcopy(config_for(model_class, hf_config))
    if described is not None:
        set_attention(hf_config, described, model_class)
    dtype = dtype or _usual_dtype(hf_config)
    if not model_class.can_generate():
        raise ConfigError(f"{source.config}/config.json: {model_class.__name__} generates no text")
    with torch.device("meta"), no_init_weights():
        model = model_class._from_config(hf_config, dtype=dtype)
    model.tie_weights()
    keep_in_float32(model, dtype)
    return model.requires_grad_(False).eval()


def _usual_dtype(hf_config: PretrainedConfig) -> torch.dtype:
    """Return float32 on the host; on a device the dtype of config.json, else bfloat16."""
    stated = hf_config.dtype if isinstance(hf_config.dtype, torch.dtype) else None
    return torch.float32 if accelerator.current().is_host else stated or torch.bfloat16


def _open(directory: Path, averaged: bool) -> WeightSource:
    return DcpWeights(directory, averaged=True) if averaged else open_weights(directory)


def read_generation_config(model: Any, directory: Path) -> None:
    """Give a model the generation configuration of its directory, if there is a file of it.

    Raises:
        ConfigError: it can't be read.
    """
    from transformers import GenerationConfig

    if not (directory / "generation_config.json").is_file():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(directory)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{directory}/generation_config.json can't be read by transformers: {error}") from error
