"""Places that a conversion's arguments name: directories and checkpoints, their models and weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.utils.errors import CheckpointError, ConfigError
from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    from mindspeed_mm.checkpoint.sources import WeightSource


class Given(NamedTuple):
    """A directory of the command line.

    Attributes:
        argument: the argument that names it, for messages.
        path: the directory.
    """

    argument: str
    path: str


def nothing_to_convert(source: Given, reason: str) -> None:
    """Say that a run reads a checkpoint or HF directory as it is.

    Raises:
        CheckpointError: it holds no weights that a run reads.
    """
    from mindspeed_mm.checkpoint.adapter_files import holds_adapters
    from mindspeed_mm.checkpoint.start import has_state

    flag = "--load"
    if holds_adapters(Path(source.path)) and not has_state(checkpoint_in(source)):
        flag = "--lora-load"
    else:
        weights_in(checkpoint_in(source), source)
    print(f"nothing to convert: {reason}; start a run from '{source.path}' as it is, with {flag} {source.path}")


def structure(directory: Given, trust_remote_code: bool = False) -> Any:
    """Build the model of config.json on the meta device.

    Raises:
        ConfigError: no HF directory, or its config.json can't be used.
    """
    import torch

    from mindspeed_mm.checkpoint.sources import listing
    from mindspeed_mm.models.common.build_context import BuildContext, build_context
    from mindspeed_mm.models.common.diffusers_init import diffusers_structure
    from mindspeed_mm.models.common.modelzoo import ModelHub
    from mindspeed_mm.models.transformers.meta_model import config_for
    from mindspeed_mm.models.transformers_model import load_hf_config

    argument, path = directory.argument, Path(directory.path)
    if not path.is_dir():
        raise ConfigError(f"{argument}: {describe_missing_model(directory.path)}; expected a HF directory")
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{argument}: '{directory.path}' has no config.json; expected a HF directory; it holds {listing(path)}"
        )
    if (of_diffusers := diffusers_structure(path)) is not None:
        return of_diffusers
    with build_context(BuildContext(trust_remote_code=trust_remote_code)):
        config = load_hf_config(directory.path, where=f"{argument}:")
    model_class: Any = ModelHub.get(None, config, where=str(path / "config.json"))
    with torch.device("meta"):
        dtype = getattr(config, "dtype", None) or torch.float32
        return model_class._from_config(config_for(model_class, config), dtype=dtype)


def checkpoint_in(given: Given, *, best: bool = False) -> Path:
    """The folder of the newest checkpoint of a run folder; any other directory unchanged.

    Args:
        best: of the checkpoint that best.json names.

    Raises:
        CheckpointError: the checkpoint, or best.json, is missing; for Megatron's torch format it says what to do.
    """
    from mindspeed_mm.checkpoint.run_folder import find_checkpoint, has_checkpoint

    root = Path(given.path)
    if best:
        return find_checkpoint(root, "best").directory
    if not has_checkpoint(root):
        return root
    try:
        return find_checkpoint(root).directory
    except CheckpointError:
        for folder in (root / "release", *sorted(root.glob("iter_*"))):
            _refuse_older_format(folder, given)
        raise


def weights_in(directory: Path, given: Given) -> WeightSource:
    """The weights of a checkpoint or HF directory.

    Args:
        given: what named the directory, for messages.

    Raises:
        CheckpointError: there are none; for Megatron's torch format it says what to do with it.
    """
    from mindspeed_mm.checkpoint.sources import open_weights

    _refuse_older_format(directory, given)
    return open_weights(directory)


def tell_no_effect(argument: str, value: object, reason: str) -> None:
    """Say that an argument has no effect, if it is given."""
    if value:
        notice(f"{argument} has no effect: {reason}")


def _refuse_older_format(directory: Path, given: Given) -> None:
    from mindspeed_mm.checkpoint.run_folder import describe_older_format

    if directory.is_dir() and (advice := describe_older_format(directory)):
        raise CheckpointError(f"{given.argument}: '{directory}' can't be read{advice}, and pass that to --load")


def refuse_existing(path: Path, argument: str) -> None:
    """Raise if something is in the place that is to be written.

    Raises:
        CheckpointError: there is.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{argument}: '{path}' is there already; remove it, or choose another place")
