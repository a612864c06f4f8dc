"""trust_remote_code: three places that say it, one meaning in the whole run."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.config import MMConfig, merge_mm_args, settle_remote_code
from mindspeed_mm.configs.data_config import DataConfig
from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.transformers_model import load_hf_config
from mindspeed_mm.utils.errors import ConfigError

_DATA_FALSE = r"data\.json: 'dataset_param\.preprocess_parameters\.trust_remote_code' is false"
_CONFIG = """
from transformers import PretrainedConfig

class RemoteConfig(PretrainedConfig):
    model_type = "remote_toy"
"""
_TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class RemoteTokenizer(PreTrainedTokenizerFast):
    is_remote = True
"""


@pytest.fixture
def remote_folder(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose model directory brings a configuration and a tokenizer as code of its own."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    hf_dir = run_folder / "hf"
    (hf_dir / "configuration_toy.py").write_text(_CONFIG)
    (hf_dir / "tokenization_toy.py").write_text(_TOKENIZER)
    config = {"model_type": "remote_toy", "auto_map": {"AutoConfig": "configuration_toy.RemoteConfig"}}
    (hf_dir / "config.json").write_text(json.dumps(config))
    described = {"auto_map": {"AutoTokenizer": [None, "tokenization_toy.RemoteTokenizer"]}}
    (hf_dir / "tokenizer_config.json").write_text(json.dumps(described))
    Tokenizer(WordLevel({"a": 0, "b": 1}, "a")).save(str(hf_dir / "tokenizer.json"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(run_folder / "modules"))
    monkeypatch.syspath_prepend(str(run_folder / "modules"))
    return run_folder


def write(folder: Path, model: Any = None, data: Any = None) -> None:
    """Let model.json and data.json say true, false, or nothing (None)."""
    for name, keys, value in (("model", (), model), ("data", ("dataset_param", "preprocess_parameters"), data)):
        content = section = json.loads((folder / f"{name}.json").read_text())
        for key in keys:
            section = section[key]
        section.pop("trust_remote_code", None)
        if value is not None:
            section["trust_remote_code"] = value
        (folder / f"{name}.json").write_text(json.dumps(content))


def flags(flag: bool = False, **more: Any) -> Namespace:
    return Namespace(mm_model="model.json", mm_data="data.json", trust_remote_code=flag, use_torch_fsdp2=True, **more)


@pytest.mark.parametrize("door", ["flag", "model", "data", "none"])
def test_each_door_opens_the_whole_run(remote_folder: Path, door: str) -> None:
    """The model's configuration and the tokenizer run their own code, or neither does."""
    write(remote_folder, True if door == "model" else None, "true" if door == "data" else None)
    args = flags(door == "flag")
    merge_mm_args(args)
    opens = door != "none"
    assert args.trust_remote_code is opens
    options = DataConfig.from_dict(args.mm.data).dataset_param.preprocess_parameters
    with build_context(BuildContext(trust_remote_code=args.trust_remote_code)):
        if opens:
            assert type(load_hf_config("hf")).__name__ == "RemoteConfig"
            assert DefaultAdapter().load_processor("hf", options).is_remote
            return
        with pytest.raises(ConfigError, match="trust_remote_code"):
            load_hf_config("hf")
        with pytest.raises(ConfigError, match="trust_remote_code"):
            DefaultAdapter().load_processor("hf", options)


def test_a_model_that_transformers_has_is_read_by_it(remote_folder: Path) -> None:
    """Published directories of such a model may bring code, too, of which the model's class knows nothing."""
    config = json.loads((remote_folder / "hf/config.json").read_text())
    (remote_folder / "hf/config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
    with build_context(BuildContext(trust_remote_code=True)):
        assert type(load_hf_config(str(remote_folder / "hf"))).__name__ == "Qwen3Config"


def test_the_megatron_backend_reads_its_directory_with_it(remote_folder: Path) -> None:
    """It compares model.json with the directory's configuration before anything is built."""
    write(remote_folder, data=True)
    files = MMConfig({"model": "model.json", "data": "data.json"})
    assert settle_remote_code(False, files) is True and files.model.trust_remote_code is True


@pytest.mark.parametrize(
    ("flag", "model", "data", "no", "yes"),
    [
        (
            True,
            None,
            False,
            _DATA_FALSE,
            "--trust",
        ),
        (
            False,
            True,
            False,
            _DATA_FALSE,
            "model",
        ),
        (False, False, True, r"model\.json: 'trust_remote_code' is false", r"data\.json"),
    ],
)
def test_places_that_disagree_are_named(
    run_folder: Path, flag: bool, model: bool | None, data: bool | None, no: str, yes: str
) -> None:
    write(run_folder, model, data)
    with pytest.raises(ConfigError, match=f"{no}, and .*{yes}.* true; code that comes"):
        merge_mm_args(flags(flag))


def test_two_that_say_false_are_one_meaning(run_folder: Path) -> None:
    write(run_folder, False, False)
    (run_folder / "hf/config.json").write_text(json.dumps({"model_type": "qwen3"}))
    args = flags()
    merge_mm_args(args)
    assert args.trust_remote_code is False


def test_generation_files_take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders and tokenizers of generation models: their files say it as the others do."""
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps({"predictor": {"model_id": "wan"}, "trust_remote_code": True}))
    data = {"dataset_type": "t2v", "basic_parameters": {"data_path": "a.json"}, "preprocess_parameters": {}}
    Path("data.json").write_text(json.dumps({"dataset_param": data}))
    files = MMConfig({"model": "model.json", "data": "data.json"})
    assert settle_remote_code(False, files) and SoRAModelConfig.from_dict(files.model).trust_remote_code
    assert GenerationDataConfig.from_dict(files.data).dataset_param.preprocess_parameters.trust_remote_code
