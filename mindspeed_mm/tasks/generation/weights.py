"""Load an unsharded predictor from a run's checkpoint or a diffusers directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mindspeed_mm.checkpoint.adapter_files import AdapterFiles, open_adapters
from mindspeed_mm.checkpoint.dcp import read_state
from mindspeed_mm.checkpoint.dcp_reader import DcpReader
from mindspeed_mm.checkpoint.lazy import LazyTensor, leaf
from mindspeed_mm.checkpoint.merged import merge_weights
from mindspeed_mm.checkpoint.pipeline_folder import component_directory, is_pipeline
from mindspeed_mm.checkpoint.run_folder import CheckpointStep, find_checkpoint, has_checkpoint
from mindspeed_mm.checkpoint.sources import (
    DcpWeights,
    WeightSource,
    has_weight_files,
    is_dcp,
    listing,
    open_weights,
)
from mindspeed_mm.checkpoint.start import has_state, is_peft
from mindspeed_mm.checkpoint.weights import load_weights
from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.models.common.meta_build import build_on_meta
from mindspeed_mm.utils.errors import CheckpointError, ConfigError
from mindspeed_mm.utils.log import info_rank0

if TYPE_CHECKING:
    from diffusers import ModelMixin

_AVERAGE = "ema."


class AveragedWeights(DcpWeights):
    """The tensors of a checkpoint, averaged ones in place of trained ones; tensors without averages weren't trained."""

    def tensors(self) -> dict[str, LazyTensor]:
        """See WeightSource."""
        tensors = super().tensors()
        for name in self.reader.tensors:
            if name.startswith(_AVERAGE):
                key = "model." + name.removeprefix(_AVERAGE)
                tensors[key] = leaf(
                    name, self.reader.shape(name), self.reader.dtype(name), self._read, keeps_dtype=True
                )
        return tensors


def locate_weights(place: str | Path, class_name: str, step: CheckpointStep | None = None) -> Path:
    """Find the folder of a predictor's weights.

    Args:
        place: a run folder, a checkpoint in it, the directory of a whole pipeline, or that of a transformer.
        class_name: diffusers class of the predictor.
        step: iteration of a run folder, or "best"; None: the one in its tracker.

    Raises:
        CheckpointError: there are none.
    """
    path = Path(place)
    if not path.is_dir():
        raise CheckpointError(f"weights: {describe_missing_model(place)}")
    if is_pipeline(path):
        return component_directory(path, class_name)
    if has_checkpoint(path):
        return find_checkpoint(path, step).directory
    if is_dcp(path) or has_weight_files(path):
        return path
    raise CheckpointError(
        f"'{path}' holds no weights; expected a run folder (with latest_checkpointed_iteration.txt), a checkpoint "
        f"(iter_…), a diffusers pipeline (model_index.json) or a transformer's directory; it holds {listing(path)}"
    )


def open_predictor_weights(directory: Path, ema: bool | None) -> WeightSource:
    """Open a folder's weights.

    Args:
        directory: result of `locate_weights`.
        ema: True: averaged weights, False: trained ones, None: averaged ones if the checkpoint has any.

    Raises:
        CheckpointError: there are no averaged ones.
    """
    if not is_dcp(directory):
        if ema:
            raise CheckpointError(
                f"--ema: '{directory}' is no checkpoint; of exports, name the averaged one instead (hf_ema)"
            )
        return open_weights(directory)
    averaged = AveragedWeights(directory)
    has_averages = any(name.startswith(_AVERAGE) for name in averaged.reader.tensors)
    if ema and not has_averages:
        raise CheckpointError(
            f"--ema: checkpoint '{directory}' holds no averaged weights; it was trained without --ema-decay: leave "
            "--ema out"
        )
    return averaged if has_averages and ema is not False else open_weights(directory)


def load_predictor(
    class_name: str,
    structure: Mapping[str, Any],
    place: str | Path,
    *,
    dtype: torch.dtype,
    step: CheckpointStep | None = None,
    ema: bool | None = None,
    base: str | Path | None = None,
    adapters: str | Path | None = None,
) -> tuple[ModelMixin, str]:
    """Build a predictor on the host and load its weights; adapters are merged into them.

    Args:
        class_name: diffusers class.
        structure: its configuration.
        place, step: see `locate_weights`.
        dtype: dtype of its parameters, except for those that diffusers keeps in float32.
        ema: see `open_predictor_weights`.
        base: where the base model's weights are, if `place` holds adapters only; None: as the checkpoint says.
        adapters: further adapters; see `open_adapters`.

    Raises:
        CheckpointError: weights are missing or don't fit.

    Returns:
        the model, in evaluation mode, and where its weights came from, in words.
    """
    import diffusers

    directory = locate_weights(place, class_name, step)
    model = build_on_meta(getattr(diffusers, class_name), structure)
    words = f"{directory}"
    source: WeightSource
    if (found := _adapters_in(directory, ema)) is not None:
        origin = locate_weights(_base_of(directory, base), class_name)
        source = merge_weights(model, open_weights(origin), found)
        words = f"{origin} with the adapters of {directory}"
    else:
        source = open_predictor_weights(directory, ema)
        words += " (averaged)" if isinstance(source, AveragedWeights) else ""
    if adapters is not None:
        source = merge_weights(model, source, open_adapters(Path(adapters)))
        words += f" with the adapters of {adapters}"
    _allocate(model, dtype)
    load_weights(model, source)
    model.requires_grad_(False)
    info_rank0(f"weights: {words}")
    return model.eval(), words


def _adapters_in(directory: Path, ema: bool | None) -> AdapterFiles | None:
    """Return the adapters of a folder that holds nothing else; None: it holds whole weights."""
    if is_peft(directory):
        return open_adapters(directory)
    if not (is_dcp(directory) and has_state(directory) and read_state(directory).get("lora")):
        return None
    averages = any(name.startswith(_AVERAGE) for name in DcpReader(directory).tensors)
    return open_adapters(directory, averaged=ema if ema is not None else averages)


def _base_of(directory: Path, base: str | Path | None) -> str | Path:
    """Return where the base of a folder's adapters is: as its own run says, if that is there, else `base`."""
    state = read_state(directory) if has_state(directory) else {}
    own = [found for found in (state.get("base"), base, state.get("source")) if found and Path(found).is_dir()]
    if not own:
        raise CheckpointError(
            f"'{directory}' holds adapters only, and their base model is not there; write its directory as "
            "'predictor.from_pretrained' or 'init_from_diffusers' in model.json"
        )
    return str(own[0])


def fill_with_adapters(model: nn.Module, directory: Path, adapters: str | Path) -> None:
    """Fill a model with the weights of its directory and adapters on top of them.

    Raises:
        CheckpointError: there are no adapters, or they don't fit.
    """
    load_weights(model, merge_weights(model, open_weights(directory), open_adapters(Path(adapters))))


def _allocate(model: nn.Module, dtype: torch.dtype) -> None:
    """Allocate parameters on the host, in the dtypes of diffusers' own loading; buffers are unchanged."""
    in_float32 = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if not param.is_floating_point():
                raise ConfigError(
                    f"{type(model).__name__}: parameter '{path}.{name}' is {param.dtype}; expected floats"
                )
            kept = in_float32.intersection((*path.split("."), name))
            module._parameters[name] = nn.Parameter(
                torch.empty(param.shape, dtype=torch.float32 if kept else dtype), requires_grad=False
            )
