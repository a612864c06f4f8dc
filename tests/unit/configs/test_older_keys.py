"""Keys and flags of older releases, and flags of other scripts: what became of them is said, and nothing is guessed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.configs.arguments import parse_args
from mindspeed_mm.configs.data_config import DataConfig
from mindspeed_mm.configs.flags import GROUPS
from mindspeed_mm.configs.flags.parser import build_parser
from mindspeed_mm.configs.flags.spec import flags_of
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.older_keys import FLAGS_OF_OTHERS, OLDER
from mindspeed_mm.configs.published import published_paths
from mindspeed_mm.configs.sections import key_paths
from mindspeed_mm.configs.serving import ServeFlags
from mindspeed_mm.configs.sora_config import SoRAModelConfig, TextEncoderConfig
from mindspeed_mm.configs.sora_inference import InferenceFlags, SoRAInferenceConfig
from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.configs.vlm_evaluation import BenchmarkFlags
from mindspeed_mm.configs.vlm_inference import AnswerFlags
from mindspeed_mm.tasks.generation.evaluation import EvaluationFlags
from mindspeed_mm.utils.errors import ConfigError

SCHEMAS: dict[str, tuple[Any, ...]] = {
    "model": (TransformersModelConfig, VLMModelConfig, SoRAModelConfig),
    "data": (DataConfig, GenerationDataConfig),
    "fsdp2": (Fsdp2Config,),
}


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def data_json(dataset_type: str, **param: Any) -> dict[str, Any]:
    basic = {"dataset": "rows.json"} if dataset_type == "huggingface" else {"data_path": "rows.jsonl"}
    preprocess = {"model_name_or_path": "hf"} if dataset_type == "huggingface" else {}
    preprocess |= param.pop("preprocess_parameters", {})
    parts = {"basic_parameters": basic, "preprocess_parameters": preprocess}
    return {"dataset_param": {"dataset_type": dataset_type, **parts, **param}}


def declared_flags() -> set[str]:
    options = build_parser(GROUPS)._option_string_actions
    return {option[2:].replace("-", "_") for option in options if option.startswith("--")}


def test_table_holds_each_name_once_and_none_that_is_known() -> None:
    """A key that the schema has, or that published files hold, would never be looked up."""
    for kind in ("model", "data", "fsdp2"):
        paths = Counter(path for row in OLDER if row.kind == kind for path in row.paths())
        assert [path for path, count in paths.items() if count > 1] == []
        known = {path for schema in SCHEMAS[kind] for path in key_paths(schema)}
        known |= {f"text_encoder.{name}" for name in TextEncoderConfig.model_fields} if kind == "model" else set()
        known |= published_paths(kind) if kind != "fsdp2" else set()
        assert paths.keys() & known == set()
    flags = Counter(name for row in OLDER if row.kind == "flag" for name in row.paths())
    declared = declared_flags()
    assert max(flags.values()) == 1 and flags.keys() & declared == set()
    others = [name for names in FLAGS_OF_OTHERS.values() for name in names.split()]
    assert len(others) == len(set(others)) and not set(others) & (declared | flags.keys())


def test_every_row_says_one_clause() -> None:
    for row in OLDER:
        assert row.became and not row.became.endswith("."), row
        assert (row.fate == "built in") <= (not row.became.startswith("write")), row


MODEL = {"init_from_hf_path": "hf"}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (TransformersModelConfig, {**MODEL, **nested("text_decoder.ckpt_path", "a.pt")}, "init_from_hf_path or --load"),
    (VLMModelConfig, {**MODEL, **nested("image_encoder.vision_encoder.is_freeze", True)}, "write freeze"),
    (TransformersModelConfig, {**MODEL, **nested("text_decoder.mtp_num_layers", 1)}, "multi-token prediction"),
    (SoRAModelConfig, nested("predictor.embeded_guidance_scale", 6.0), "write diffusion.guidance"),
    (SoRAModelConfig, nested("predictor.attention_bias", False), "config.json of predictor.from_pretrained"),
    (SoRAModelConfig, nested("diffusion.snr_gamma", 5.0), "aren't weighted by min-SNR"),
    (SoRAModelConfig, nested("diffusion.denoiser_config", {"num_idx": 1000}), "model_id ddpm"),
    (SoRAModelConfig, {"allow_tf32": True}, "--allow-tf32"),
    (SoRAInferenceConfig, nested("pipeline_config.embedded_guidance_scale", 6.0), "diffusers pipeline does it"),
    (GenerationDataConfig, data_json("t2v", use_feature_data=True), "dataset_type: feature"),
    (GenerationDataConfig, data_json("t2v", preprocess_parameters={"fps": 8}), "write train_fps"),
    (GenerationDataConfig, data_json("t2v", mask_type_ratio_dict_video={"i2v": 1}), "task: i2v"),
    (DataConfig, data_json("image"), "of an older release: write multimodal"),
    (Fsdp2Config, {"zero3_size": 8}, "write sharding_size"),
]


@pytest.mark.parametrize(("schema", "content", "words"), REFUSED, ids=lambda value: "")
def test_a_key_that_changes_training_is_refused_with_what_to_write(
    schema: Any, content: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        schema.from_dict(content)
    assert "of an older release" in str(raised.value) and words in str(raised.value)
    assert "did you mean" not in str(raised.value) and "unknown key" not in str(raised.value)


TAKEN: list[tuple[Any, dict[str, Any], str]] = [
    (TransformersModelConfig, {**MODEL, **nested("text_decoder.apply_rope_fusion", True)}, "apply_rope_fusion"),
    (VLMModelConfig, {**MODEL, **nested("text_decoder.mla_zero_memory", True)}, "mla_zero_memory"),
    (TransformersModelConfig, {**MODEL, **nested("text_decoder.ckpt_path", None)}, "ckpt_path"),
    (SoRAModelConfig, nested("predictor.single_stream_full_recompute_layers", 40), "recompute_modules"),
    (SoRAModelConfig, nested("ae.encoder_resnet_blocks", ["ResnetBlock2D"]), "ae.from_pretrained"),
    (SoRAModelConfig, {"text_encoder": [{"using_kwargs": ["pixel_values"]}]}, "text_encoder.using_kwargs"),
    (GenerationDataConfig, data_json("t2v", use_feature_data=False), "use_feature_data"),
    (GenerationDataConfig, data_json("t2v", preprocess_parameters={"vae_scale_factor": [4, 8, 8]}), "the model says"),
]


@pytest.mark.parametrize(("schema", "content", "words"), TAKEN, ids=lambda value: "")
def test_a_key_that_nothing_depends_on_is_taken_and_said(
    schema: Any, content: dict[str, Any], words: str, said: list[str]
) -> None:
    schema.from_dict(content)
    assert any("of an older release" in line and words in line for line in said), said


def test_all_older_keys_of_a_file_are_told_at_once_beside_misspelt_ones() -> None:
    content = {"predictor": {"input_size": [6, 96, 170], "dropout": 0.0}, "diffusion": {"noise_offset": 0.02}, "tsk": 1}
    with pytest.raises(ConfigError) as raised:
        SoRAModelConfig.from_dict(content)
    lines = str(raised.value).splitlines()
    assert [line.split("'")[1] for line in lines] == [
        "predictor.input_size",
        "predictor.dropout",
        "diffusion.noise_offset",
        "tsk",
    ]
    assert "did you mean 'task'" in lines[-1]


def flags_said(run_folder: Path, *words: str) -> Any:
    common = "--mm-model model.json --mm-data data.json --micro-batch-size 1 --lr 1e-5 --train-iters 1"
    return parse_args([*common.split(), *words])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--q-lora-rank", "1536"), "flag '--q-lora-rank' is of an older release: the config.json of"),
        (("--fp8-format", "hybrid"), "write float8_recipe in fsdp2.yaml"),
        (("--use_ema",), "write --ema-decay"),
        (("--prompts", "a.txt"), "flag '--prompts' belongs to inference_sora.py"),
        (("--cfg.hf_config.hf_dir", "x"), "belongs to mm-convert"),
        (("--model_assets_dir", "x"), "belongs to mm-convert"),
        (("--hps_reward_save", "x"), "belongs to posttrain_flux_dancegrpo.py, which is not there yet"),
        (("--src_dir", "x"), "belongs to a command that prepares data"),
        (("--shard-megabytes", "8"), "belongs to mindspeed-mm data extract-features"),
        (("--nproc_per_node", "8"), "is torchrun's: write it before the script's name"),
    ],
)
def test_a_flag_of_another_script_or_release_says_whose_it_is(
    words: tuple[str, ...], expected: str, run_folder: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        flags_said(run_folder, *words)
    assert expected in str(raised.value) and "did you mean" not in str(raised.value)


def test_flags_that_nothing_depends_on_are_left_out_with_their_values(run_folder: Path, said: list[str]) -> None:
    args = flags_said(run_folder, "--moe-zero-memory", "level0", "--tp-x", "2", "--use_ascend_mc2", "--seed", "7")
    assert args.seed == 7 and not hasattr(args, "tp_x")
    assert sum("--moe-zero-memory, --tp-x, --use_ascend_mc2, of an older release" in line for line in said) == 1


def test_a_script_s_own_flag_of_an_older_name_is_its_own(run_folder: Path) -> None:
    def provider(parser: Any) -> Any:
        parser.add_argument("--sp-size", type=int)
        return parser

    assert parse_args(["--sp-size", "2", "--train-iters", "1"], provider, required=()).sp_size == 2


def test_flags_in_a_run_s_yaml_are_told_likewise(run_folder: Path, said: list[str]) -> None:
    flags = {"train_iters": 1, "smart_swap": True, "fp8": False}
    (run_folder / "run.yaml").write_text(yaml.safe_dump({"gpt_args": flags}))
    assert parse_args(["run.yaml"], required=()).train_iters == 1
    assert any("'gpt_args.smart_swap' has no effect here, of an older release" in line for line in said)
    flags |= {"noop_layers": "47", "prompts": "a.txt"}
    (run_folder / "run.yaml").write_text(yaml.safe_dump({"gpt_args": flags}))
    with pytest.raises(ConfigError) as raised:
        parse_args(["run.yaml"], required=())
    assert "'gpt_args.noop_layers' is '47'; this flag is of an older release" in str(raised.value)
    assert "'gpt_args.prompts' is 'a.txt'; this flag belongs to inference_sora.py" in str(raised.value)


SHARED = {"batch_size", "output", "dtype"}  # what other trainers call flags of ours


def test_lists_of_other_scripts_flags_are_complete() -> None:
    """Every flag that a script has beside those of a training."""
    declared = declared_flags()
    answers = {item.name for item in flags_of(AnswerFlags)}
    assert set(FLAGS_OF_OTHERS["evaluate_vlm.py"].split()) == {item.name for item in flags_of(BenchmarkFlags)} - answers
    assert set(FLAGS_OF_OTHERS["mindspeed-mm serve"].split()) == {item.name for item in flags_of(ServeFlags)} - answers
    for script, group in {"inference_sora.py": InferenceFlags, "evaluate_gen.py": EvaluationFlags}.items():
        own = {item.name for item in flags_of(group)} - declared - SHARED
        assert own == set(FLAGS_OF_OTHERS[script].split()), script


@pytest.mark.parametrize(
    ("schema", "content", "words"),
    [
        (SoRAModelConfig, {"text_encoder": [{"hidden_state_skip_layer": 1}, {}]}, "two layers before the last"),
        (SoRAModelConfig, {"text_encoder": [{"load_in_8bit": True}, {"load_in_8bit": False}]}, "write false"),
        (SoRAModelConfig, {"text_encoder": {"output_key": "logits"}}, "diffusers pipeline takes"),
        (SoRAInferenceConfig, nested("pipeline_config.guidance_rescale", 0.7), "not rescaled"),
        (SoRAInferenceConfig, {"frame_interval": 2}, "every frame of a sample is written"),
        (
            TransformersModelConfig,
            {**MODEL, **nested("image_encoder.vision_encoder.ckpt_path", "a.pt")},
            "never for one",
        ),
    ],
    ids=lambda value: "",
)
def test_published_keys_with_other_values_than_the_published_are_refused(
    schema: Any, content: dict[str, Any], words: str
) -> None:
    """What a notice said to have no effect would change states, samples or weights."""
    with pytest.raises(ConfigError, match=words):
        schema.from_dict(content)
