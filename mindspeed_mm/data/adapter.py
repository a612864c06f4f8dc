"""What the data room needs to know of a model family, as a protocol; families implement it in their own folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.utils.errors import ConfigError, did_you_mean

_PATH_KEY = "dataset_param.preprocess_parameters.model_name_or_path"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


@runtime_checkable
class DataAdapter(Protocol):
    """A model family as the data room sees it. Must be picklable: it travels to the loader's workers."""

    media_keys: Mapping[str, Sequence[str]]
    """Medium ("image", "video") → names of its tensors in a batch; the last one has one row a medium."""

    token_keys: Sequence[str]
    """Names of tensors beside `input_ids` that hold one value a token."""

    def media_counts(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Return the number of media of each kind in a batch, 0 included."""
        ...

    def load_processor(self, path: str, options: PreprocessParameters) -> Any:
        """Return the processor of the model in `path`, or its tokenizer where it reads text only."""
        ...


class DefaultAdapter:
    """Processors like Qwen-VL's (media tensors stacked on dim 0, one grid row a medium), and text models."""

    media_keys: Mapping[str, Sequence[str]] = {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    }
    token_keys: Sequence[str] = ("mm_token_type_ids",)

    def media_counts(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Count media by the rows of their grids."""
        return {
            medium: int(batch[keys[-1]].shape[0]) if batch.get(keys[-1]) is not None else 0
            for medium, keys in self.media_keys.items()
        }

    def load_processor(self, path: str, options: PreprocessParameters) -> Any:
        """Load the processor named in the directory, or the tokenizer where there is no processor.

        The class is taken by its name: transformers' Auto classes import much that a data worker never needs.

        Raises:
            ConfigError: Nothing loadable in `path`.
        """
        import transformers

        extra: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
        if options.fix_mistral_regex:
            extra["fix_mistral_regex"] = True
        try:
            if has_processor(path):
                name = _processor_class(path)
                found = getattr(transformers, name, None) if name and not options.trust_remote_code else None
                return (found or transformers.AutoProcessor).from_pretrained(path, **extra)
            return transformers.AutoTokenizer.from_pretrained(path, **extra)
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            raise ConfigError(f"{_PATH_KEY}: the processor of {path} can't be loaded: {error}") from error


def has_processor(path: str) -> bool:
    """Whether a model directory has a processor; a name on the hub is taken to have one."""
    return not os.path.isdir(path) or any(os.path.isfile(os.path.join(path, name)) for name in _PROCESSOR_FILES)


def check_model_path(path: str) -> None:
    """Check, without loading anything, that a model directory exists and holds a tokenizer.

    Raises:
        ConfigError: With the nearest name beside it, or what was looked for in it.
    """
    if os.path.isdir(path):
        if not any(os.path.isfile(os.path.join(path, name)) for name in _TOKENIZER_FILES):
            raise ConfigError(f"{_PATH_KEY}: {path} holds no tokenizer; looked for {', '.join(_TOKENIZER_FILES)}")
        return
    hub_name = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    if hub_name and not os.path.isdir(os.path.dirname(path)):
        return
    parent = Path(path).parent
    near = did_you_mean(Path(path).name, (entry.name for entry in parent.iterdir())) if parent.is_dir() else ""
    raise ConfigError(f"{_PATH_KEY}: no folder {path} (working folder {os.getcwd()}){near}")


def _processor_class(path: str) -> str | None:
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        try:
            found = json.loads(Path(path, name).read_text(encoding="utf-8")).get("processor_class")
        except (OSError, ValueError):
            continue
        if isinstance(found, str):
            return found
    return None
