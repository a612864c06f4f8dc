"""model.json of the Megatron backend: published examples, freezing, stages, recompute, mistakes."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs import vlm_rules
from mindspeed_mm.configs.arguments import parse_args
from mindspeed_mm.configs.config import ConfigReader, merge_mm_args
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.published import published_paths
from mindspeed_mm.configs.sections import key_paths
from mindspeed_mm.configs.vlm_config import VLMModelConfig, check_pipeline_layers
from mindspeed_mm.utils.errors import ConfigError
from tests.unit.configs.published_vlm import ELSEWHERE, SIZES, published_model


def described(**keys: Any) -> VLMModelConfig:
    return VLMModelConfig.from_dict({"init_from_hf_path": "hf", **keys}, file="m.json")


def with_part(part: str, **keys: Any) -> VLMModelConfig:
    return described(**({"text_decoder": keys} if part == "text_decoder" else {"image_encoder": {part: keys}}))


@pytest.mark.parametrize("size", SIZES)
def test_published_files(said: list[str], size: str) -> None:
    content = published_model(size, **ELSEWHERE)
    before = copy.deepcopy(content)
    config = VLMModelConfig.from_dict(ConfigReader(content, file="model.json"))
    assert content == before and config.model_id == "qwen2_5_vl" and config.file == "model.json"
    assert (config.freeze_vision_encoder, config.freeze_vision_projector, config.freeze_text_decoder) == (
        True,
        True,
        False,
    )
    assert config.text_decoder.num_layers == content["text_decoder"]["num_layers"]
    assert config.image_encoder.vision_encoder.fullatt_block_indexes == [7, 15, 23, 31]
    assert all(line.startswith("model.json: no effect here: ") for line in said)
    for key in ("text_decoder.seq_length", "image_encoder.tp", "patch.infer_fa", "generation_config.top_k"):
        assert sum(key in line for line in said) == 1
    assert not any("text_encoder" in line for line in said)  # null says nothing
    count = len(said)
    VLMModelConfig.from_dict(content)
    assert len(said) == count


@pytest.mark.parametrize("size", SIZES)
def test_published_files_with_fsdp2(said: list[str], size: str) -> None:
    """The same files beside --use-torch-fsdp2, once they name a HF directory."""
    audio = {"audio_encoder": {"audio_encoder": {"n_window": 100, "freeze": True, "pipeline_num_layers": [32, 0]}}}
    content = published_model(size, init_from_hf_path="hf", **ELSEWHERE, **audio)
    config = TransformersModelConfig.from_dict(content)
    assert config.model_id == "qwen2_5_vl" and config.freeze_vision_encoder is True
    assert any("text_decoder.pipeline_num_layers" in line and "FSDP2 shards" in line for line in said)


def test_defaults() -> None:
    config = VLMModelConfig.from_dict({})
    assert (config.freeze_vision_encoder, config.freeze_vision_projector, config.freeze_text_decoder) == (
        True,
        False,
        False,
    )
    assert config.default_freezes() == {"vision_encoder": True, "vision_projector": False, "text_decoder": False}
    assert config.init_from_hf_path is None and not config.train_from_scratch
    assert config.loss_cfg.effective_chunk_size == 1024
    for part in ("vision_encoder", "vision_projector", "text_decoder"):
        assert config.pipeline_layers(part) is None
    assert config.recompute_of("text_decoder") == {}


@pytest.mark.parametrize(
    "keys, part, value",
    [
        ({"image_encoder": {"vision_encoder": {"freeze": False}}}, "vision_encoder", False),
        ({"freeze_vision_model": False}, "vision_encoder", False),
        ({"freeze_vision_projection": True}, "vision_projector", True),
        ({"text_decoder": {"freeze": "true"}}, "text_decoder", True),
        ({"freeze_language_model": True}, "text_decoder", True),
    ],
)
def test_what_is_said_about_freezing_wins(keys: dict[str, Any], part: str, value: bool) -> None:
    config = described(**keys)
    assert getattr(config, f"freeze_{part}") is value and part not in config.default_freezes()


@pytest.mark.parametrize(
    "given, rows",
    [
        ([11, 17], [[11, 17]]),
        ([[5, 5], [9, 9]], [[5, 5], [9, 9]]),
        ([28], [[28]]),
        (["1", 10.0, 10, 7], [[1, 10, 10, 7]]),
        (None, None),
    ],
)
@pytest.mark.parametrize("part", ["vision_encoder", "vision_projector", "text_decoder"])
def test_layers_of_stages(part: Any, given: Any, rows: Any) -> None:
    assert with_part(part, pipeline_num_layers=given).pipeline_layers(part) == rows


@pytest.mark.parametrize(
    "keys, settings",
    [
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        ),
        (
            {"recompute_granularity": "selective"},
            {"recompute_granularity": "selective", "recompute_method": None, "recompute_num_layers": None},
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform"},
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": None},
        ),
        ({"recompute_num_layers": 3}, {"recompute_num_layers": 3}),
    ],
)
def test_recompute_of_a_part(keys: dict[str, Any], settings: dict[str, Any]) -> None:
    """A granularity of its own leaves nothing of the flags'."""
    assert with_part("text_decoder", **keys).recompute_of("text_decoder") == settings
    assert with_part("vision_encoder", **keys).recompute_of("vision_encoder") == settings
    assert with_part("text_decoder", **keys).recompute_of("vision_encoder") == {}


@pytest.mark.parametrize(
    "keys, parts",
    [
        ({"text_decodr": {}}, ["unknown key 'text_decodr'", "'text_decoder'"]),
        ({"text_decoder": {"num_layer": 3}}, ["unknown key 'text_decoder.num_layer'", "'num_layers'"]),
        ({"image_encoder": {"freeze": True}}, ["unknown key 'image_encoder.freeze'", "belongs at"]),
        ({"text_decoder": {"num_layers": "many"}}, ["'text_decoder.num_layers' is 'many'", "a whole number"]),
        ({"text_decoder": {"pipeline_num_layers": 4}}, ["'text_decoder.pipeline_num_layers' is 4", "[11, 17]"]),
        ({"text_decoder": {"pipeline_num_layers": []}}, ["pipeline_num_layers' is []", "[11, 17]"]),
        ({"text_decoder": {"pipeline_num_layers": [[1], 2]}}, ["pipeline_num_layers' is [[1], 2]", "list of such"]),
        ({"text_decoder": {"pipeline_num_layers": [-1, 2]}}, ["pipeline_num_layers' is [-1, 2]"]),
        ({"text_decoder": {"activation_func": "gelu"}}, ["'text_decoder.activation_func' is 'gelu'", "silu only"]),
        ({"text_decoder": {"hidden_dropout": 0.1}}, ["'text_decoder.hidden_dropout' is 0.1", "0.0 only"]),
        ({"text_decoder": {"gated_linear_unit": False}}, ["'text_decoder.gated_linear_unit' is false", "true only"]),
        ({"text_decoder": {"normalization": "LayerNorm"}}, ["'LayerNorm'", "RMSNorm only"]),
        ({"text_decoder": {"position_embedding_type": "alibi"}}, ["'alibi'", "mrope or rope only"]),
        ({"text_decoder": {"rope_scaling": {"type": "yarn"}}}, ["'text_decoder.rope_scaling'", "write null"]),
        ({"text_decoder": {"num_moe_experts": 8}}, ["'text_decoder.num_moe_experts' is 8", "experts"]),
        ({"image_encoder": {"vision_encoder": {"post_layer_norm": True}}}, ["post_layer_norm' is true", "false only"]),
        ({"image_encoder": {"vision_projector": {"activation_func": "silu"}}}, ["'silu'", "gelu only"]),
        ({"audio_encoder": {"audio_encoder": {"num_layers": 32}}}, ["'audio_encoder'", "--use-torch-fsdp2"]),
        ({"video_encoder": {"model_id": "x"}}, ["'video_encoder'", "--use-torch-fsdp2"]),
        ({"text_encoder": {"model_id": "T5"}}, ["'text_encoder'", "--use-torch-fsdp2"]),
        ({"dist_config": {"model_name": "x"}}, ["'dist_config'", "a layout of its own"]),
        ({"vision_encoder": {"freeze": False}}, ["'vision_encoder.freeze'", "image_encoder.vision_encoder.freeze"]),
        ({"freeze": ["visual"]}, ["'freeze' is ['visual']", "text_decoder.freeze"]),
        ({"patch": {"layerwise_disaggregated_training": True}}, ["'patch.layerwise_disaggregated_training' is true"]),
        ({"loss_cfg": {"loss_type": "raw"}}, ["'loss_cfg.loss_type' is 'raw'", "exact"]),
        ({"loss_cfg": {"chunk_size": 0}}, ["'loss_cfg.chunk_size' is 0", "at least 1"]),
        (
            {"freeze_vision_model": True, "image_encoder": {"vision_encoder": {"freeze": False}}},
            ["'image_encoder.vision_encoder.freeze' is false, 'freeze_vision_model' is true", "keep one"],
        ),
        ({"text_decoder": {"recompute_granularity": "full"}}, ["text_decoder", "needs recompute_method"]),
        (
            {"text_decoder": {"recompute_granularity": "full", "recompute_method": "block"}},
            ["block needs recompute_num_layers"],
        ),
        (
            {"text_decoder": {"recompute_granularity": "selective", "recompute_num_layers": 2}},
            ["belong to recompute_granularity full"],
        ),
    ],
)
def test_mistakes(keys: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        described(**keys)
    for part in ["m.json: ", *parts]:
        assert part in str(caught.value)


def test_every_rule_is_of_use() -> None:
    paths = published_paths("model") - set(key_paths(VLMModelConfig))
    rules = vlm_rules.IDLE_VLM_KEYS
    used = {next(rule for rule in rules if re.fullmatch(rule.pattern, path)) for path in paths}
    assert used == set(rules)
    known = published_paths("model")
    for rule in vlm_rules.REFUSED_VLM_KEYS:
        assert any(path == rule.path or path.startswith(rule.path + ".") for path in known), rule.path


# --- layers of each stage against the parallel sizes


def staged(text: Any = None, vision: Any = None, projector: Any = None) -> VLMModelConfig:
    image = {"vision_encoder": {"pipeline_num_layers": vision}, "vision_projector": {"pipeline_num_layers": projector}}
    return described(text_decoder={"pipeline_num_layers": text}, image_encoder=image)


@pytest.mark.parametrize(
    "lists, pipeline, virtual",
    [
        ({}, 4, None),
        ({"text": [1, 10, 10, 7], "vision": [32, 0, 0, 0]}, 4, None),
        ({"text": [0, 14, 14], "vision": [16, 16, 0]}, 3, None),
        ({"text": [0, 0, 28], "vision": [32, 0, 0], "projector": [0, 1, 0]}, 3, None),
        ({"text": [[5, 9], [5, 9]], "vision": [[32, 0], [0, 0]]}, 2, 2),
        ({"text": [[0, 9], [10, 9]], "vision": [[32, 0], [0, 0]], "projector": [[1, 0], [0, 0]]}, 2, 2),
        ({"text": [28], "vision": [32]}, 1, None),
        ({"text": [[28]]}, 1, None),
    ],
)
def test_lists_that_fit(lists: dict[str, Any], pipeline: int, virtual: int | None) -> None:
    assert check_pipeline_layers(staged(**lists), pipeline, virtual, 32, 28) == []


@pytest.mark.parametrize(
    "lists, pipeline, virtual, parts",
    [
        ({"text": [14, 14]}, 4, None, ["'text_decoder.pipeline_num_layers' has 2 numbers", "size is 4"]),
        ({"text": [28]}, 2, None, ["has 1 number ([28])", "size is 2"]),
        ({"text": [14, 15]}, 2, None, ["adds up to 29", "has 28 layers"]),
        (
            {"vision": [30, 0]},
            2,
            None,
            ["'image_encoder.vision_encoder.pipeline_num_layers' adds up to 30", "has 32 layers"],
        ),
        ({"projector": [1, 1]}, 2, None, ["'image_encoder.vision_projector.pipeline_num_layers' adds up to 2"]),
        ({"text": [[7, 7], [7, 7]]}, 2, None, ["is a list of 2 lists", "is absent", "give the flag as 2"]),
        ({"text": [14, 14]}, 2, 2, ["is one list", "write 2 lists of 2 numbers"]),
        ({"text": [[7, 7], [7, 7], [0, 0]]}, 2, 2, ["has 3 lists", "size is 2"]),
        ({"text": [[7, 7], [14]]}, 2, 2, ["has 1 number ([14])", "size is 2"]),
        ({"text": [14, 14], "vision": [16, 16]}, 2, None, ["vision layers on stage 1", "language layers on stage 0"]),
        (
            {"text": [14, 14], "vision": [32, 0], "projector": [0, 1]},
            2,
            None,
            ["the projector on stage 1", "language layers on stage 0"],
        ),
        (
            {"text": [0, 28], "vision": [16, 16], "projector": [1, 0]},
            2,
            None,
            ["the projector on stage 0", "before the last vision layers on stage 1"],
        ),
        ({"text": [[7, 7], [7, 7]], "vision": [[16, 0], [16, 0]]}, 2, 2, ["vision layers on stage 2", "on stage 0"]),
    ],
)
def test_lists_that_do_not_fit(lists: dict[str, Any], pipeline: int, virtual: int | None, parts: list[str]) -> None:
    problems = check_pipeline_layers(staged(**lists), pipeline, virtual, 32, 28)
    assert len(problems) == 1
    for part in ["m.json: ", *parts]:
        assert part in problems[0]


def test_a_text_model_has_no_vision_lists_to_check() -> None:
    assert check_pipeline_layers(staged(text=[14, 14], vision=[9]), 2, None, None, 28) == []


# --- which description a launch is checked against


def merged(words: str, content: dict[str, Any]) -> None:
    Path("model.json").write_text(json.dumps(content))
    minimal = "--mm-model model.json --mm-data data.json --micro-batch-size 1 --lr 1 --train-iters 1"
    merge_mm_args(parse_args(f"{minimal} {words}".split(), backends=("ptd", "fsdp2")))


def test_a_launch_is_checked_against_its_backend(run_folder: Path) -> None:
    dropout = {"init_from_hf_path": "./hf", "text_decoder": {"hidden_dropout": 0.1}}
    merged("--use-torch-fsdp2", dropout)
    with pytest.raises(ConfigError, match=r"model\.json: 'text_decoder\.hidden_dropout' is 0\.1"):
        merged("", dropout)
    with pytest.raises(ConfigError, match="'init_from_hf_path' is missing"):
        merged("--use-torch-fsdp2", published_model("3b"))


def test_a_start_needs_weights_from_somewhere(run_folder: Path, qwen3_dir: Path) -> None:
    (run_folder / "ckpt").mkdir()
    merged("--load ckpt", published_model("3b"))
    merged("", published_model("3b", train_from_scratch=True))
    merged("", {"init_from_hf_path": str(qwen3_dir)})
    for words in ("", "--load new --save new"):
        with pytest.raises(ConfigError, match=r"no weights to start from: give 'init_from_hf_path'.*--load"):
            merged(words, published_model("3b"))
    with pytest.raises(ConfigError, match=r"'init_from_hf_path': \./hff does not exist"):
        merged("", {"init_from_hf_path": "./hff"})


def test_a_launch_is_checked_against_the_hf_directory(run_folder: Path, qwen3_dir: Path) -> None:
    """And its stages against the flags: before anything is built."""
    content = {"init_from_hf_path": str(qwen3_dir), "text_decoder": {"pipeline_num_layers": [1, 1]}}
    merged("--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 1", content)
    with pytest.raises(ConfigError, match=r"model\.json: 'text_decoder\.pipeline_num_layers' has 2 numbers"):
        merged("--pipeline-model-parallel-size 4", content)
    with pytest.raises(ConfigError, match=r"is one list; with --virtual-pipeline-model-parallel-size 2 write 2 lists"):
        merged("--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2", content)
    with pytest.raises(ConfigError, match=r"'text_decoder\.num_layers' is 9, .*num_hidden_layers is 2"):
        merged("", content | {"text_decoder": {"num_layers": 9}})
    stages = [8, 8, 10, 10], [0, 32, 0, 0]
    content = published_model("3b", train_from_scratch=True)
    content["text_decoder"]["pipeline_num_layers"] = stages[0]
    content["image_encoder"]["vision_encoder"]["pipeline_num_layers"] = stages[1]
    with pytest.raises(ConfigError, match="vision layers on stage 1, after the first language layers on stage 0"):
        merged("--pipeline-model-parallel-size 4", content)
