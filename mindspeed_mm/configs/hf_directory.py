"""Directories in the hub's layout: the message about a missing one, and reading its config.json."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.configs.families_not_there import missing_class
from mindspeed_mm.configs.files import describe_missing
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.utils.errors import ConfigError, did_you_mean
from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FOLDERS = {"checkpoint", "checkpoints", "ckpt", "ckpts", "data", "model", "models", "out", "output", "runs", "weights"}


def hub_advice(path: str | Path) -> str:
    """Return `; fetch it with …` where a path that isn't there looks like a name on the hub, else an empty string.

    A run reads directories only and downloads nothing: its ranks would do so all at once, and at any time another
    revision.
    """
    name = str(path)
    if len(name) > 200:
        return ""
    owner, _, model = name.partition("/")
    if not _HUB_ID.fullmatch(name) or owner.lower() in _FOLDERS or os.path.isdir(owner):
        return ""
    place = f"ckpt/{model}"
    return (
        f"; if it is the name of a model on the hub: nothing is downloaded here, so fetch it with `hf download {name} "
        f"--local-dir {place}` and write {place} instead"
    )


def describe_missing_model(path: str | Path) -> str:
    """Return `describe_missing` for the directory of a model, processor or tokenizer, which may be a hub's name."""
    advice = hub_advice(path)
    return f"{path} does not exist{advice}" if advice else describe_missing(path)


def read_hf_config(directory: str | Path, where: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read config.json of a directory with transformers.

    Args:
        directory: in the hub's layout.
        where: the file and key that name it, for messages.
        trust_remote_code: whether code in it may run.

    Raises:
        ConfigError: no such directory or no config.json in it, no JSON object, no model_type or one that transformers
            doesn't know, values that it doesn't take.
    """
    import transformers

    directory = Path(directory)
    source = directory / "config.json"
    if not os.path.isdir(directory):
        raise ConfigError(f"{where}: {describe_missing_model(directory)}")
    if not source.is_file():
        found = ", ".join(sorted(p.name for p in directory.iterdir())[:10])
        raise ConfigError(f"{where} '{directory}' has no config.json ({found}); expected a HF directory")
    if _check_model_type(source) and trust_remote_code:
        notice(f"{source} is read by transformers' own class, as transformers has the model: no code in it runs")
        trust_remote_code = False  # transformers would prefer that code, but the model's class is its own in any case
    try:
        return transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # values of a wrong type raise almost anything
        raise ConfigError(f"{source} can't be read by transformers: {error}") from error


def _check_model_type(source: Path) -> bool:
    """Refuse a config.json without a model_type that transformers knows, on which everything else depends.

    Returns:
        whether the file names code of its own, but transformers has the model.
    """
    import transformers

    try:
        content = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source} can't be read by transformers: no valid JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: found {show(content)}, expected an object with keys such as model_type")
    known, found = list(transformers.CONFIG_MAPPING.keys()), content.get("model_type")
    if "auto_map" in content:
        return found in known  # else transformers reports what is wrong with it
    if found is None:
        named = f" (its architectures are {show(content['architectures'])})" if content.get("architectures") else ""
        raise ConfigError(
            f"{source} has no 'model_type'{named}, so nothing says what the model is; take the config.json of the "
            'checkpoint as it was published, or add the key, as in "model_type": "qwen3"'
        )
    if found not in known:
        if sentence := missing_class(found, str(source), "model_type"):
            raise ConfigError(sentence)
        raise ConfigError(
            f"{source}: 'model_type' is {show(found)}, which transformers {transformers.__version__} doesn't know"
            f"{did_you_mean(str(found), known)}; a newer transformers may know it, or a module of yours (model.json: "
            "plugin) may register it"
        )
    return False


def model_id_problem(file: str, model_id: str, source: str, model_type: str) -> str:
    """Return the sentence about a model_id that contradicts the model_type of a directory.

    Args:
        file: model.json, for messages.
        source: config.json, for messages.
    """
    return (
        f"{file}: 'model_id' is {show(model_id)}, but the model_type of {source} is {show(model_type)}; if that is the "
        f'model to be trained, write "model_id": {json.dumps(model_type)} or leave model_id out; else let '
        f"init_from_hf_path name the directory of a {model_id}"
    )
