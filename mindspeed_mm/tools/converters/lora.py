"""Conversion of adapters: merging them into their base model, and writing those of a checkpoint as PEFT directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_mm.tools.converters.places import Given, checkpoint_in, refuse_existing, structure
from mindspeed_mm.tools.inspect_weights import progress_bar
from mindspeed_mm.utils.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from mindspeed_mm.checkpoint.adapter_files import AdapterFiles


class Factor(NamedTuple):
    """The factor on adapters' output, by the arguments that give it."""

    argument: str
    value: float


def merge_adapters(
    base: Given,
    adapters: Given,
    target: Given,
    *,
    scaling: Factor | None = None,
    trust_remote_code: bool = False,
    check: Callable[[Any, Given], None] | None = None,
) -> None:
    """Write a base model with adapters added as a HF or diffusers directory, tensor by tensor.

    Args:
        base: HF or diffusers directory.
        adapters: PEFT directory, file of diffusers, or checkpoint of adapters of either backend.
        target: the directory to write.
        scaling: the factor on the adapters' output; what the adapters say must not be another one.
        check: raises if the base model isn't what the converter is for.

    Raises:
        CheckpointError: something is missing or doesn't fit, or the target can't be written.
        ConfigError: the factor isn't that of the adapters.
    """
    from mindspeed_mm.checkpoint.hf_export import export_from
    from mindspeed_mm.checkpoint.merged import merge_weights
    from mindspeed_mm.checkpoint.safetensors_writer import tensor_bytes
    from mindspeed_mm.checkpoint.sources import open_weights

    model = structure(base, trust_remote_code)
    if check is not None:
        check(model, base)
    found = _open(adapters)
    factor = _factor(found, scaling, adapters)
    source = merge_weights(model, open_weights(base.path), found, scaling=factor)
    refuse_existing(Path(target.path), target.argument)
    total = sum(tensor_bytes(tuple(t.shape), t.dtype) for t in source.tensors().values())
    with progress_bar(f"{base.path} + {adapters.path} → {target.path}", total) as advance:
        count = export_from(source, model, Path(target.path), base.path, None, advance)
    print(f"{count} tensors in {target.path}, adapters merged; it loads with from_pretrained")


def adapters_to_peft(checkpoint: Given, target: Given) -> None:
    """Write the adapters of a checkpoint as a PEFT directory; nothing, if they are in one already.

    Raises:
        CheckpointError: there are no adapters, nothing says their settings, or the target can't be written.
    """
    from mindspeed_mm.checkpoint.adapters import write_peft_files
    from mindspeed_mm.checkpoint.lazy import whole
    from mindspeed_mm.checkpoint.sources import is_dcp

    directory = checkpoint_in(checkpoint)
    found = _open(checkpoint)
    if not is_dcp(directory):
        nothing_to_convert_of_adapters(checkpoint)
        return
    if not found.config:
        raise CheckpointError(
            f"{checkpoint.argument}: '{directory}' has no state.json that says the settings of its adapters (rank, "
            "alpha), which a PEFT directory needs; merge them into their base model instead: mm-convert "
            "GenericDCPConverter merge_lora --base HF_DIR --adapter DIR --out DIR --scaling ALPHA_BY_RANK"
        )
    path = Path(target.path)
    refuse_existing(path, target.argument)
    path.mkdir(parents=True, exist_ok=True)
    tensors = found.named(lambda name: f"model.{name}" in found.tensors)
    values = {name: tensor.node.read(whole(tensor.shape)).contiguous() for name, tensor in tensors.items()}
    write_peft_files(path, values, found.config)
    print(f"{len(values)} tensors of adapters in {path}; it loads with PeftModel.from_pretrained, and --lora-load")


def nothing_to_convert_of_adapters(adapters: Given) -> None:
    """Say that a run reads adapters as they are.

    Raises:
        CheckpointError: there are none.
    """
    _open(adapters)
    print(
        "nothing to convert: both backends read adapters of PEFT and of diffusers; start a run from "
        f"'{adapters.path}' as it is, with --lora-load {adapters.path}"
    )


def _open(adapters: Given) -> AdapterFiles:
    from mindspeed_mm.checkpoint.adapter_files import open_adapters

    try:
        return open_adapters(Path(adapters.path))
    except CheckpointError as error:
        raise CheckpointError(f"{adapters.argument}: {error}") from error


def _factor(found: AdapterFiles, scaling: Factor | None, adapters: Given) -> float | None:
    """Return the factor on the adapters' output that the command line gives; None: as the adapters say."""
    if scaling is None:
        return None
    alpha, rank = found.config.get("lora_alpha"), found.config.get("r")
    factor = scaling.value
    if alpha is None or rank is None:
        return factor
    stored = float(alpha) / (float(rank) ** 0.5 if found.config.get("use_rslora") else float(rank))
    if abs(stored - factor) > 1e-6 * abs(stored):
        raise ConfigError(
            f"{scaling.argument} makes the factor on the adapters' output {factor:g}, and those of '{adapters.path}' "
            f"were trained with {stored:g} (alpha {alpha}, rank {rank}); leave it out"
        )
    return None
