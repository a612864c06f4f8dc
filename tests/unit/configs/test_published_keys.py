"""Every published key, flag and variable is taken with every value seen in published files, or refused with a sentence;
what has no effect is said.

`published_values.json` holds them: key → values, a list as one object of it (`[]`), long ones cut.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.configs.arguments import parse_args
from mindspeed_mm.configs.config import merge_mm_args
from mindspeed_mm.configs.data_config import DataConfig
from mindspeed_mm.configs.environment import VARIABLES, log_environment_notices
from mindspeed_mm.configs.flags.spec import BackendName
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.multimodal_data import TILE_KEYS
from mindspeed_mm.configs.published import published_paths
from mindspeed_mm.configs.sections import key_paths, sort_keys
from mindspeed_mm.configs.sora_config import SoRAModelConfig, TextEncoderConfig
from mindspeed_mm.configs.sora_rules import STRUCTURE
from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.data.conversation.named_templates import TEMPLATES
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import forget_notices

PUBLISHED: dict[str, dict[str, list[Any]]] = json.loads(Path(__file__).with_name("published_values.json").read_text())
SORA, TRANSFORMERS, VLM = (f"model of pretrain_{name}.py" for name in ("sora", "transformers", "vlm"))

Base = Callable[[], dict[str, Any]]


def data_file() -> dict[str, Any]:
    return {
        "dataset_param": {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset": "rows.json"},
            "preprocess_parameters": {"model_name_or_path": "hf"},
        }
    }


def model_file() -> dict[str, Any]:
    return {"init_from_hf_path": "hf"}


def with_key(content: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Set a dotted key; `a[].b` is b of the first object in the list a."""
    place = content
    *parents, last = path.split(".")
    for part in parents:
        name, is_list = part.removesuffix("[]"), part.endswith("[]")
        if not isinstance(place.get(name), list if is_list else dict):
            place[name] = [{}] if is_list else {}
        place = place[name][0] if is_list else place[name]
    place[last] = value
    return content


def pairs(kind: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, values in PUBLISHED[kind].items():
        if key.startswith(prefix):
            yield from ((key.removeprefix(prefix), value) for value in values)


def whole_file(kind: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """All keys of a kind of file in one, each with its last value; an object goes before a list of objects."""
    content: dict[str, Any] = {}
    for key, values in PUBLISHED[kind].items():
        if "[]" not in key and not key.startswith(without):
            with_key(content, key, values[-1])
    return content


SORA_REFUSED = {"task", "predictor.model_type", *(key for key in PUBLISHED[SORA] if key.startswith("dpo."))}
#: parameters of a step are nothing without the step's name
STEPS = {key for key in PUBLISHED["data"] if re.search(r"train_pipeline\.(image|video)\[\]\.param\.", key)}
CASES: list[tuple[str, str, Base, Any, set[str]]] = [
    # kind, prefix of its keys, a file to put a key into, its schema, what is refused
    ("data", "", data_file, DataConfig, {"dataset_param.dataset_type", *STEPS}),
    (TRANSFORMERS, "", model_file, TransformersModelConfig, set()),
    (VLM, "", model_file, TransformersModelConfig, set()),
    (SORA, "", dict, SoRAModelConfig, SORA_REFUSED),
    (VLM, "", model_file, VLMModelConfig, {key for key in PUBLISHED[VLM] if key.startswith("audio_encoder.")}),
    ("gpt_args yaml", "model.", model_file, TransformersModelConfig, {"text_decoder.moe_aux_loss_coeff"}),
    ("gpt_args yaml", "data.", data_file, DataConfig, set()),
    ("fsdp2", "", dict, Fsdp2Config, set()),
]


@pytest.mark.parametrize(("kind", "prefix", "base", "schema", "refused"), CASES)
def test_every_key_is_taken_with_every_value(
    kind: str, prefix: str, base: Base, schema: Any, refused: set[str], said: list[str]
) -> None:
    """All but those that ask for what isn't there; what the schema doesn't honour is said by its name."""
    problems, silent = {}, []
    fields = set(key_paths(schema)) | {f"text_encoder.{name}" for name in TextEncoderConfig.model_fields}
    fields |= {f"dataset_param.{name}" for name in TILE_KEYS}  # honoured under the processor's names
    for key, value in pairs(kind, prefix):
        forget_notices()
        said.clear()
        try:
            schema.from_dict(with_key(base(), key, value))
        except ConfigError as error:
            problems[key] = str(error)
            continue
        plain_key = key.replace("[]", "")
        if kind == SORA and STRUCTURE.fullmatch(key):
            continue  # the predictor's family translates it
        if plain_key not in fields and value is not None and not any(plain_key in line for line in said):
            silent.append(key)
    assert problems.keys() == refused, problems
    ways_out = re.compile(r"not there yet|belongs to|write that instead|expected one of")
    assert all(ways_out.search(sentence) for sentence in problems.values())
    assert {key for key in silent if ".train_pipeline." not in key} == set()


def test_other_dataset_types_name_their_script() -> None:
    for value in PUBLISHED["data"]["dataset_param.dataset_type"]:
        if value in ("huggingface", "multimodal"):
            continue
        script = {
            "bagel": "is not there yet: it belongs to pretrain_omni.py",
            "vace": "is not there yet: it belongs to pretrain_sora.py",
        }.get(value, "belongs to pretrain_sora.py; expected huggingface, multimodal or corpus")
        with pytest.raises(ConfigError, match=f"'{value}'; this dataset type {script}"):
            DataConfig.from_dict(with_key(data_file(), "dataset_param.dataset_type", value))


def test_every_template_is_there_or_the_model_s_own(said: list[str]) -> None:
    names = dict.fromkeys(
        value for kind in ("data", "gpt_args yaml") for key, value in pairs(kind) if "template" in key
    )
    own = []
    for name in names:
        if name in ("examples/hunyuanvideo_1.5/template.json", "li-dit-encode-video-json", "internvl2_5"):
            continue  # of other keys
        key = "dataset_param.basic_parameters.template"
        template = DataConfig.from_dict(with_key(data_file(), key, name)).dataset_param.basic_parameters.template
        own += [name] if template is None else []
        assert template is None or template in TEMPLATES
    assert own == ["glm4v_moe", "mistral", "qwen2_omni", "qwen3_omni"] and len(said) == len(own)


def test_keys_of_diffusion_models_are_known() -> None:
    for key, value in pairs(SORA):
        unknown = sort_keys(TransformersModelConfig, with_key({}, key, value), published_paths("model")).unknown
        assert unknown == {}, key


def test_whole_files(said: list[str]) -> None:
    """Keys don't stand in each other's way."""
    config = TransformersModelConfig.from_dict({**whole_file(TRANSFORMERS), **model_file()})
    assert config.freeze_vision_encoder and config.freeze_audio_encoder and not config.freeze_text_decoder
    of_vlm = whole_file(VLM, without=("audio_encoder",))
    assert VLMModelConfig.from_dict(of_vlm).text_decoder.num_layers in (28, 36, 64, 80)
    assert TransformersModelConfig.from_dict({**of_vlm, **model_file()}).model_id == "qwen2_5_vl"
    assert len(said) < 30  # by reason, not by key


def run_files(folder: Path, model: Mapping[str, Any]) -> Namespace:
    (folder / "model.json").write_text(json.dumps(model))
    (folder / "hf").mkdir(exist_ok=True)
    return Namespace(
        mm_model=str(folder / "model.json"),
        load=None,
        backends=("fsdp2",),
        use_torch_fsdp2=True,
        mm_data=None,
        mm_tool=None,
    )


BAGEL = ("mllm", "visual_gen", "visual_und", "image_encoder")
OWNERS: list[tuple[str, dict[str, Any]]] = [
    ("pretrain_sora.py", {key: whole_file(SORA)[key] for key in ("ae", "text_encoder", "predictor", "diffusion")}),
    ("pretrain_sora.py", {"task": "t2v", "ae": {"model_id": "wan_video_vae"}}),
    ("inference_sora.py", {"pipeline_class": "WanPipeline", "predictor": {"model_id": "wandit"}, "prompt": "x.txt"}),
    ("posttrain_sora_dpo.py", {"dpo": {"loss_beta": 2000}, "predictor": {"model_id": "wandit"}}),
    ("pretrain_omni.py", {key: whole_file(SORA)[key] for key in BAGEL}),
    ("pretrain_omni.py", {"model_id": "bagel", "ae": {"model_id": "flux_vae"}}),
]


@pytest.mark.parametrize(("script", "content"), OWNERS)
def test_a_model_of_another_script_is_said_to_be_one(script: str, content: dict[str, Any], tmp_path: Path) -> None:
    there = ";" if script in ("pretrain_sora.py", "inference_sora.py") else ", which is not there yet;"
    with pytest.raises(ConfigError, match=rf"model\.json: .*belongs to {script}{there} this script trains language"):
        merge_mm_args(run_files(tmp_path, content))


@pytest.mark.parametrize(
    ("script", "content"),
    [
        ("evaluate_vlm.py", {"evaluation_dataset": "ai2d_test", "generation_config": {"top_k": 1}}),
        ("inference_vlm.py", {"pipeline_class": "Qwen2VlPipeline", "generation_config": {"top_k": 1}}),
    ],
)
def test_a_file_of_vlm_inference_can_be_trained(
    script: str, content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    merge_mm_args(run_files(tmp_path, {**model_file(), **content}))
    assert f"belongs to {script}; its model is trained here" in said[0]


# flags that are no training's, and those that ask for what isn't there
TORCHRUN = {"--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port"}
DATA_PREPARATION = {"--src_dir", "--des_dir", "--num_processes", "--onnx_path", "--instruct"}
REFUSED = {"--no-shuffle"}


@pytest.mark.parametrize("backend", ["fsdp2", "ptd"])
def test_every_flag_is_taken_with_every_value(backend: BackendName, run_folder: Path) -> None:
    """Shell variables stand for 1, or for a file that is there."""
    files = {f"--mm-{name}": f"{name}.json" for name in ("model", "data")} | {"--mm-tool": "tools.json"}
    files |= {"--fsdp2-config-path": "fsdp2.yaml", "--load": ".", "--save": "out"}
    problems: dict[str, str] = {}
    for flag, value in [(flag, value) for flag, values in PUBLISHED["flags"].items() for value in values or [""]]:
        word = files.get(flag, re.sub(r"\$\{?\w+\}?", "1", value))
        words = [flag, *([word] if word else []), *(["--use-torch-fsdp2"] if backend == "fsdp2" else [])]
        if flag != "--train-iters":
            words += ["--train-iters", "1"]
        try:
            parse_args(words, required=(), backends=("ptd", "fsdp2"))
        except ConfigError as error:
            problems[flag] = str(error)
    assert problems.keys() == TORCHRUN | DATA_PREPARATION | REFUSED, problems
    for flag, sentence in problems.items():
        said = "torchrun's" if flag in TORCHRUN else "prepares data" if flag in DATA_PREPARATION else "remove|write"
        assert re.search(said, sentence), sentence


def test_every_key_of_a_run_in_yaml_is_taken(run_folder: Path) -> None:
    """Flags as keys, and the values for other places."""
    problems: dict[str, str] = {}
    for key, value in pairs("gpt_args yaml"):
        if key.startswith(("model.", "data.")):
            continue
        here = {"fsdp2_config_path": "fsdp2.yaml", "load": "."}.get(key.removeprefix("gpt_args."), value)
        base = {"gpt_args": {"use_torch_fsdp2": True, "train_iters": 1}, "model": model_file(), "data": data_file()}
        content = with_key(base, key, "tools.json" if key == "MM_TOOL_PATH" else here)
        (run_folder / "run.yaml").write_text(yaml.safe_dump(content))
        try:
            args = parse_args(["run.yaml"], required=())
        except ConfigError as error:
            problems[key] = str(error)
            continue
        name = key.removeprefix("gpt_args.").removeprefix("lora_args.")
        if isinstance(value, (int, float)) and not name.startswith("no_"):
            assert getattr(args, name) == value, key
    assert not problems


def test_every_variable_is_known(said: list[str]) -> None:
    """Those that change nothing here are said once; ours are told apart from misspelt ones."""
    assert PUBLISHED["environment"].keys() <= VARIABLES.keys()
    exported = {name: values[0] for name, values in PUBLISHED["environment"].items()}
    log_environment_notices(exported)
    assert [line.split()[2] for line in said] == ["ENABLE_GC_THRESHOLD"]
    said.clear()
    script = {"MM_DATA": "data.json", "MM_MODEL": "model.json", "MM_CONVERT_X": "1", "NON_MEGATRON": "false"}
    log_environment_notices({**script, "MM_DEVCE": "cpu", "MM_OTHER": "1"})
    assert said == ["the variable MM_DEVCE is unknown; did you mean MM_DEVICE?"]
