"""Initial weights of a run without a checkpoint: named weights, or random values on request."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.models.common.build_context import current_build_context
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import info_rank0

_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "diffusion_pytorch_model*.bin")


def weight_files(directory: str | Path) -> list[str]:
    """Names of the files in a model's directory that contain weights; none if it isn't there."""
    path = Path(directory)
    return sorted({file.name for pattern in _PATTERNS for file in path.glob(pattern)})


def check_first_weights(
    what: str, directory: str | Path | None, *, from_scratch: bool, ignores: bool, file: str, keys: tuple[str, str]
) -> None:
    """Refuse a run that would begin with random values although they weren't requested, or although weights are there.

    Args:
        what: the model, for messages.
        directory: that model.json names; None: it names none.
        from_scratch, ignores: `train_from_scratch` and `ignore_weights`.
        file: of both, for messages.
        keys: the one that names the directory, and a sentence on how else weights are named.

    Raises:
        ConfigError: with the ways out.
    """
    context = current_build_context()
    if not (context.in_run and context.load_weights):
        return
    key, others = keys
    if not from_scratch:
        if directory is None:
            raise ConfigError(
                f'{file}: there are no weights to start from: give {others}, or "train_from_scratch": true for random '
                "ones"
            )
        return
    found = weight_files(directory) if directory is not None else []
    if found and not ignores:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise ConfigError(
            f"{file}: 'train_from_scratch' is true, but '{key}' '{directory}' holds weights ({found[0]}{more}), which "
            "would not be read: remove 'train_from_scratch' to start from them; to begin with random values all the "
            'same, add "ignore_weights": true beside it, or name a directory with the configuration and tokenizer '
            "files only"
        )
    unread = f"; the weights in '{directory}' are not read (ignore_weights)" if found else ""
    info_rank0(f"{what}: random weights (train_from_scratch), seed {context.seed}{unread}")
