"""model.json of a generation model: keys, values, and what is told before anything is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.config import merge_mm_args, settle_caption_length
from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.configs.sora_checks import check_generation_files, check_generation_model
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.tasks.train.generation import SORA
from mindspeed_mm.utils.errors import ConfigError
from tests.support.runs import described_args

TINY = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1}


def model(**keys: Any) -> dict[str, Any]:
    """A model of pixels from scratch, whose text states are made before."""
    predictor = {"model_id": "wan", "config": TINY, "train_from_scratch": True}
    return {"ae": {"model_id": "pixel"}, "load_text_features": True, "predictor": predictor, **keys}


def problems(**keys: Any) -> list[str]:
    return check_generation_model(SoRAModelConfig.from_dict(model(**keys)))


def diffusers_directory(path: Path, name: str = "config.json") -> str:
    path.mkdir(parents=True)
    (path / name).write_text("{}")
    return str(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"predictr": {}}, ["unknown key 'predictr'", "'predictor'"]),
        ({"predictor": {"modle_id": "wan"}}, ["predictor.modle_id", "'model_id'"]),
        ({"text_encoder": [{"from_pretraind": "x"}]}, ["text_encoder.from_pretraind", "'from_pretrained'"]),
        ({"task": "t2x"}, ["'task' is 't2x'", "t2v, i2v, ti2v, t2i"]),
        ({"task": "vace"}, ["'vace'", "not there yet"]),
        ({"diffusion": {"max_timestep_boundary": 1.5}}, ["max_timestep_boundary", "from 0 (all noise) to 1"]),
        ({"diffusion": {"sampling": "logit"}}, ["'diffusion.sampling' is 'logit'", "logit_normal"]),
        ({"diffusion": {"reverse": False}}, ["'diffusion.reverse' is false", "write true"]),
        ({"predictor": {"model_type": "flf2v"}}, ["'predictor.model_type' is 'flf2v'", "not there yet", "i2v"]),
        ({"predictor": {"config": 3}}, ["predictor.config", "diffusers' config.json"]),
        ({"dpo": {"loss_beta": 2000}}, ["'dpo'", "not there yet"]),
        ({"ae": {"freeze": False}}, ["'ae.freeze' is false", "is not trained", "write true"]),
        ({"predictor": {"FPDT": True}}, ["'predictor.FPDT' is true", "write false"]),
    ],
)
def test_faults_are_sentences(content: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        SoRAModelConfig.from_dict(content, "m.json")
    assert str(caught.value).startswith("m.json: ")
    for word in words:
        assert word in str(caught.value)


def test_all_faults_of_a_file_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        SoRAModelConfig.from_dict({"predictr": {}, "dpo": {"loss_beta": 1}, "ae": {"model_idd": "pixel"}})
    assert len(str(caught.value).splitlines()) == 3


def test_structure_is_kept_for_the_family(said: list[str]) -> None:
    config = SoRAModelConfig.from_dict({"predictor": {"hidden_size": 24, "patch_size": [1, 2, 2]}})
    assert config.predictor.structure == {"hidden_size": 24, "patch_size": [1, 2, 2]}
    assert said == []


def test_training_s_shift_and_density_by_either_key() -> None:
    def diffusion(**keys: Any) -> tuple[float | None, str | None]:
        config = SoRAModelConfig.from_dict({"diffusion": keys}).diffusion
        return config.training_shift, config.density

    assert diffusion() == (None, None)
    assert diffusion(shift=5, sampling="mode") == (5.0, "mode")
    assert diffusion(shift=7.0, train_timestep_shift=3.0, snr="lognorm") == (3.0, "logit_normal")
    assert diffusion(snr="uniform") == (None, "uniform")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"predictor": {"model_id": "wan"}}, ["no weights to start from", "train_from_scratch", "--load"]),
        ({"predictor": {"from_pretrained": "there/transformer"}}, ["'predictor.from_pretrained'", "does not exist"]),
        ({"ae": {"model_id": "wan_video_vae"}}, ["'ae.from_pretrained' is missing", "load_video_features"]),
        ({"ae": None}, ["'ae' is missing", '"pixel"']),
        ({"ae": {"from_pretrained": "no/vae"}}, ["'ae.from_pretrained'", "does not exist"]),
        ({"load_text_features": False}, ["'text_encoder' is missing", "load_text_features"]),
        (
            {"load_text_features": False, "text_encoder": [{"model_id": "UMT5"}, {"from_pretrained": "no"}]},
            ["'text_encoder[0].from_pretrained' is missing", "'text_encoder[1].from_pretrained': no does not exist"],
        ),
        ({"image_encoder": {"dtype": "fp32"}}, ["'image_encoder.from_pretrained' is missing"]),
        ({"init_from_diffusers": "no/pipeline"}, ["'init_from_diffusers'", "does not exist"]),
        (
            {"diffusion": {"min_timestep_boundary": 0.9, "max_timestep_boundary": 0.4}},
            ["min_timestep_boundary' 0.9", "max_timestep_boundary' 0.4", "exchange them"],
        ),
        (
            {"diffusion": {"model_id": "wan_flow_match_scheduler", "sampling": "logit_normal"}},
            ["'diffusion.sampling' is 'logit_normal'", '"model_id": "flow_matching"'],
        ),
        (
            {"diffusion": {"sampling": "mode", "snr": "lognorm"}},
            ["'diffusion.sampling' is 'mode' and 'diffusion.snr' 'lognorm'", "keep one"],
        ),
    ],
)
def test_what_keeps_a_model_from_training(keys: dict[str, Any], words: list[str]) -> None:
    found = "\n".join(problems(**keys))
    for word in words:
        assert word in found


def test_a_model_that_can_be_trained(tmp_path: Path) -> None:
    assert problems() == []
    directory = diffusers_directory(tmp_path / "transformer")
    assert problems(predictor={"from_pretrained": directory}) == []
    assert problems(load_text_features=False, text_encoder={"from_pretrained": directory}) == []
    whole = diffusers_directory(tmp_path / "pipeline", "model_index.json")
    [missing] = check_generation_model(SoRAModelConfig.from_dict({"init_from_diffusers": whole}))
    assert "has no folder transformer and no folder vae and no folder text_encoder;" in missing
    for part in ("transformer", "vae", "text_encoder"):
        diffusers_directory(tmp_path / "pipeline" / part)
    assert check_generation_model(SoRAModelConfig.from_dict({"init_from_diffusers": whole})) == []
    no_weights = SoRAModelConfig.from_dict(model(predictor={"model_id": "wan"}))
    assert check_generation_model(no_weights, has_checkpoint=True) == []
    made = model(load_video_features=True, ae={"from_pretrained": "isn't needed"})
    assert check_generation_model(SoRAModelConfig.from_dict(made)) == []


def test_a_directory_one_level_off_is_found(tmp_path: Path) -> None:
    inside = diffusers_directory(tmp_path / "pipeline" / "transformer")
    [above] = problems(predictor={"from_pretrained": str(tmp_path / "pipeline")})
    assert "has no config.json" in above and f"'{inside}' has one" in above
    file = str(Path(inside, "config.json"))
    [of_file] = problems(predictor={"from_pretrained": file})
    assert "is a file" in of_file and f"'{inside}' holds one" in of_file


@pytest.mark.parametrize(
    ("kind", "video", "text", "words"),
    [
        ("t2v", True, False, ["'load_video_features' is true", "'t2v'", '"dataset_type": "feature"']),
        ("i2v", True, True, ["'load_video_features' and 'load_text_features' are true", "'i2v'"]),
        ("feature", False, True, ["'feature'", "'load_video_features' is false", "write true"]),
        ("feature", False, False, ["'load_video_features' is false"]),
        ("feature", True, False, []),
        ("t2v", False, False, []),
        ("feature", True, True, []),
    ],
)
def test_both_files_say_whether_data_are_features(kind: str, video: bool, text: bool, words: list[str]) -> None:
    described = SoRAModelConfig.from_dict(model(load_video_features=video, load_text_features=text), "m.json")
    found = check_generation_files(described, GenerationDataConfig.from_dict(data(kind), "d.json"))
    assert len(found) == bool(words)
    for word in [*words, *(["m.json", "d.json"] if words else [])]:
        assert word in found[0]


def data(kind: str = "t2v") -> dict[str, Any]:
    return {"dataset_param": {"dataset_type": kind, "basic_parameters": {"data_path": "rows.jsonl"}}}


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """describe with a model.json and a data.json, as pretrain_sora.py calls it."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    words = "--mm-model model.json --mm-data data.json --micro-batch-size 1 --lr 1e-4 --train-iters 1"

    def call(of_model: dict[str, Any], of_data: dict[str, Any], *more: str) -> Any:
        Path("model.json").write_text(json.dumps(of_model))
        Path("data.json").write_text(json.dumps(of_data))
        return described_args([*words.split(), *more], SORA)

    return call


PIXELS = model(load_video_features=True)


def test_fsdp2_is_implied(launch: Callable[..., Any], said: list[str]) -> None:
    args = launch(PIXELS, data("feature"))
    assert args.use_torch_fsdp2 and args.mm.model.ae.model_id == "pixel"
    assert [line for line in said if "--use-torch-fsdp2 is implied" in line] == said[:1]
    said.clear()
    launch(PIXELS, data("feature"), "--use-torch-fsdp2")
    assert said == []


def test_parallel_sizes_are_refused(launch: Callable[..., Any]) -> None:
    kinds = ("tensor-model", "pipeline-model", "context")
    sizes = [word for kind in kinds for word in (f"--{kind}-parallel-size", "2")]
    with pytest.raises(ConfigError) as caught:
        launch(PIXELS, data("feature"), *sizes)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and all("predictors have no" in line and "sharding_size" in line for line in lines)
    Path("experts.yaml").write_text("expert_parallel_size: 2\n")
    with pytest.raises(ConfigError, match=r"^experts.yaml: expert_parallel_size is 2: predictors have no expert"):
        launch(PIXELS, data("feature"), "--fsdp2-config-path", "experts.yaml", "--dry-run", "--world-size", "2")


@pytest.mark.parametrize(
    ("of_model", "of_data", "words"),
    [
        (
            {"init_from_hf_path": "hf", "text_decoder": {}},
            data(),
            ["model.json", "belongs to pretrain_transformers.py", "make videos or images"],
        ),
        (
            {"text_decoder": {"num_layers": 1}, "image_encoder": {"vision_encoder": {"freeze": True}}},
            data(),
            ["belongs to pretrain_vlm.py"],
        ),
        ({"mllm": {"model_id": "qwen2MoT"}, "predictor": {}}, data(), ["belongs to pretrain_omni.py", "not there yet"]),
        (PIXELS, data("huggingface"), ["data.json", "'huggingface'", "belongs to pretrain_vlm.py or pretrain_trans"]),
        (PIXELS, data("t2v"), ["'load_video_features'", "'t2v'"]),
        (
            model(predictor={"from_pretrained": "a"}, ae={"from_pretrained": "b"}, load_text_features=False),
            {"dataset_param": {"dataset_type": "t2v", "basic_parameters": {"data_pth": "x"}}},
            ["'predictor.from_pretrained': a", "'ae.from_pretrained': b", "'text_encoder' is missing", "'data_path'"],
        ),
    ],
)
def test_files_that_do_not_fit(
    launch: Callable[..., Any], of_model: dict[str, Any], of_data: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(of_model, of_data)
    for word in words:
        assert word in str(caught.value)


def test_an_inference_file_can_be_trained(launch: Callable[..., Any], said: list[str]) -> None:
    inference = {"pipeline_class": "WanPipeline", "prompt": "p.txt", "pipeline_config": {"input_size": [81, 480, 832]}}
    launch({**PIXELS, **inference}, data("feature"))
    assert any("belongs to inference_sora.py; its model is trained here" in line for line in said)
    assert any("pipeline_config.input_size" in line and "no effect here" in line for line in said)


def test_a_generation_model_is_told_to_other_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(PIXELS))
    from argparse import Namespace

    args = Namespace(mm_model="model.json", backends=("fsdp2",), use_torch_fsdp2=True, load=None)
    with pytest.raises(ConfigError, match=r"belongs to pretrain_sora\.py; this script trains language"):
        merge_mm_args(args)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"patch": {"adaptive_clip_grad_norm": True}}, r"patch\.adaptive_clip_grad_norm' is true; .*--clip-grad"),
        ({"patch": {"layerwise_disaggregated_training": True}}, r"layerwise_disaggregated_training' is true"),
        ({"patch": {"ae_float32": True}, "ae": {"dtype": "bf16"}}, r"patch\.ae_float32' is true and 'ae\.dtype' bf16"),
    ],
)
def test_patches_that_change_what_is_trained(keys: dict[str, Any], message: str) -> None:
    """They are refused; switched off, or saying what is done anyway, they are fine."""
    model = {"predictor": {"model_id": "wan"}}
    with pytest.raises(ConfigError, match=message):
        SoRAModelConfig.from_dict({**model, **keys})
    off = {"patch": dict.fromkeys(keys["patch"], False)}
    SoRAModelConfig.from_dict({**model, **off})
    SoRAModelConfig.from_dict({**model, "patch": {"ae_float32": True}, "ae": {"dtype": "fp32"}})


def _lengths(model_json: dict[str, Any], tokenizer: Any, kind: str = "t2v") -> list[int | None]:
    settle_caption_length(model_json, {"dataset_param": {"dataset_type": kind, "tokenizer_config": tokenizer}})
    return [encoder.max_length for encoder in SoRAModelConfig.from_dict(model_json).text_encoder]


@pytest.mark.parametrize(
    ("encoders", "tokenizer", "expected"),
    [
        ({"from_pretrained": "x"}, {"from_pretrained": "x", "model_max_length": 300}, [300]),
        ([{"from_pretrained": "x"}, {}], [{"model_max_length": "300"}, {"model_max_length": 77}], [300, None]),
        (None, {"model_max_length": 300}, [300]),
        ({"max_length": 300}, {"model_max_length": 300}, [300]),
        ({"max_length": 64}, {"from_pretrained": "x"}, [64]),
    ],
)
def test_a_tokenizers_longest_caption_is_the_encoders(encoders: Any, tokenizer: Any, expected: Any) -> None:
    described = {**model(), "load_text_features": False} | ({"text_encoder": encoders} if encoders else {})
    assert _lengths(described, tokenizer) == expected


def test_features_have_their_captions_cut_already() -> None:
    assert _lengths(model(text_encoder={}), {"model_max_length": 300}, "feature") == [None]


def test_two_longest_captions_are_refused() -> None:
    described = {**model(text_encoder={"max_length": 512}), "load_text_features": False}
    with pytest.raises(ConfigError, match=r"512 tokens by .*max_length and 300 by data.json's"):
        _lengths(described, {"model_max_length": 300})
