"""Check of a run's initial weights: pretrained weights, or random values if they are requested."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.models.common.build_context import current_build_context
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import info_rank0

_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "diffusion_pytorch_model*.bin")


def weight_files(directory: str | Path) -> list[str]:
    """Return the names of the files with weights in a model's directory; none if there is no such directory."""
    path = Path(directory)
    return sorted({file.name for pattern in _PATTERNS for file in path.glob(pattern)})


def check_first_weights(
    what: str, directory: str | Path | None, *, from_scratch: bool, ignores: bool, file: str, keys: tuple[str, str]
) -> None:
    """Refuse a run that would start from random values without a request, or although there are weights.

    Args:
        what: name of the model, for messages.
        directory: the directory that model.json names; None: it names none.
        from_scratch: `train_from_scratch` of model.json.
        ignores: `ignore_weights` of model.json.
        file: name of model.json, for messages.
        keys: the key that names the directory, and a phrase with all ways to give weights.

    Raises:
        ConfigError: the run is refused; the message lists the alternatives.
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
