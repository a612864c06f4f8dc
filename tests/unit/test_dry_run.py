"""`--dry-run`: one JSON object about a launch, from directories that hold config files only."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig

from mindspeed_mm.configs.recipe import Recipe
from mindspeed_mm.dry_run import asks_for_dry_run, dry_run
from mindspeed_mm.models.common.base_model import FSDP2Mixin
from mindspeed_mm.tasks.generation import inference
from mindspeed_mm.tasks.train.generation import SORA
from mindspeed_mm.tasks.train.language import TRANSFORMERS, VLM
from mindspeed_mm.tools.feature_extraction import command
from mindspeed_mm.utils.log import forget_notices
from tests.support.families import families
from tests.support.runs import OWN
from tests.support.tiny import tiny_qwen2_5_vl_dir

FLAGS = [*"--mm-model model.json --mm-data data.json --micro-batch-size 2 --lr 1e-4 --train-iters 1".split()]  # noqa: SIM905


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    forget_notices()
    return tmp_path


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of Qwen2.5-VL without weights, tokenizer and processor."""
    whole, folder = tiny_qwen2_5_vl_dir(tmp_path_factory.mktemp("whole")), tmp_path_factory.mktemp("config_only")
    shutil.copy(whole / "config.json", folder)
    return folder


def answer(recipe: Recipe, model: Any, capsys: pytest.CaptureFixture[str], *words: str, data: Any = None) -> Any:
    Path("model.json").write_text(json.dumps(model))
    rows = {"basic_parameters": {"dataset": "gone.json"}, "preprocess_parameters": {"model_name_or_path": "."}}
    Path("data.json").write_text(json.dumps(data or {"dataset_param": {"dataset_type": "huggingface", **rows}}))
    status = dry_run(recipe, [*FLAGS, *words, "--dry-run"])
    assert not dist.is_initialized()
    found = json.loads(capsys.readouterr().out)
    assert found["accepted"] is (status == 0)
    return found


def test_fsdp2_model_layout_units_and_notices(
    folder: Path, config_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "fsdp2.yaml").write_text(
        "sharding_size: 4\nsub_modules_to_wrap: ['model.language_model.layers.{*}']\n"
        "recompute_modules: ['model.visual.blocks.{0}']\n"
    )
    model = {
        "init_from_hf_path": str(config_only),
        "image_encoder": {"vision_encoder": {"freeze": True}, "vision_projector": {"freeze": False}},
    }
    words = ("--use-torch-fsdp2", "--fsdp2-config-path", "fsdp2.yaml", "--world-size", "8", "--log-params-norm")
    found = answer(VLM, model, capsys, *words)
    assert found["layout"] == {
        **{"backend": "fsdp2", "world_size": 8, "pp": 1, "dp": 8, "tp": 1, "ep": 1, "ep_shard": 1},
        **{"cp": 1, "ring": 1, "ulysses": 1, "dp_replicate": 2, "dp_shard": 4},
    }
    assert found["units"] == [f"model.language_model.layers.{n}" for n in range(len(found["units"]))]
    assert found["prefetch"] == {"forward": "1 on devices, 0 on the host", "backward": 1}
    assert found["recomputed"] == ["model.visual.blocks.0"] and found["ignored"] == []
    assert found["model"]["class"] == "Qwen2_5_VLForConditionalGeneration"
    assert 0 < found["model"]["trained_parameters"] < found["model"]["parameters"]
    assert found["batch"]["global_batch_size"] == 16 and found["batch"]["data_parallel_size"] == 8
    assert found["steps_per_epoch"] is None and found["why_no_steps_per_epoch"]
    assert any("--log-params-norm has no effect" in line for line in found["notices"])


def test_what_saves_memory(folder: Path, config_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = "recompute_modules: ['model.visual.blocks.{0}']\nrecompute_keep: [attention]\n"
    (folder / "fsdp2.yaml").write_text(keys + "activation_offload_modules: ['model.visual.blocks.{0}']\n")
    words = "--use-torch-fsdp2 --fsdp2-config-path fsdp2.yaml --swap-attention --chunk-mlp-tokens 64".split()  # noqa: SIM905
    found = answer(VLM, {"init_from_hf_path": str(config_only)}, capsys, *words)
    assert found["recomputed"] == ["model.visual.blocks.0"] and found["kept"] == ["attention"]
    layers = {path.rpartition(".")[0] for path in found["chunked_mlps"]}
    assert "model.visual.blocks.0" in layers and all(path.endswith(".mlp") for path in found["chunked_mlps"])
    names = {"model.visual.blocks": "attn", "model.language_model.layers": "self_attn"}
    swapped = {f"{path}.{names[path.rpartition('.')[0]]}" for path in layers} - {"model.visual.blocks.0.attn"}
    assert set(found["offloaded"]) == {"model.visual.blocks.0", *swapped}
    found = answer(VLM, {"init_from_hf_path": str(config_only)}, capsys, *words[:1], "--recompute-activations")
    assert set(found["recomputed"]) == {*swapped, "model.visual.blocks.0.attn"} and found["kept"] == ["linear"]


def test_what_each_parallelism_splits(folder: Path, config_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make = families()["qwen3_moe"].published["30B-A3B"][0]
    (folder / "hf").mkdir()
    config = {**make().to_dict(), "architectures": ["Qwen3MoeForCausalLM"]}
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    sizes = "--tensor-model-parallel-size 2 --context-parallel-size 4 --expert-model-parallel-size 8".split()  # noqa: SIM905
    found = answer(TRANSFORMERS, {"init_from_hf_path": "hf"}, capsys, *sizes, "--use-torch-fsdp2", "--world-size", "16")
    layout = found["layout"]
    assert {n: layout[n] for n in ("tp", "ulysses", "dp", "ep", "ep_shard")} == {
        **{"tp": 2, "ulysses": 4, "dp": 2, "ep": 8, "ep_shard": 2}
    }
    assert found["experts"] == [f"model.layers.{n}.mlp.experts" for n in range(48)]
    attention = "model.layers.47.self_attn"
    assert {f"{attention}.q_proj", f"{attention}.v_proj", "lm_head"} <= set(found["columns"])
    assert f"{attention}.o_proj" in found["rows"] and "towers" not in found
    words = ("--context-parallel-size", "2", "--use-torch-fsdp2", "--world-size", "2")
    found = answer(VLM, {"init_from_hf_path": str(config_only)}, capsys, *words)
    assert found["towers"] == ["model.visual"] and not {"experts", "columns", "rows"} & found.keys()


def test_trained_parameters_with_adapters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of attention and of the experts, split over tensor- and expert-parallel ranks; paths are those without PEFT."""
    config = families()["qwen3_moe"].published["30B-A3B"][0]()
    (folder / "hf").mkdir()
    content = {**config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"]}
    (folder / "hf" / "config.json").write_text(json.dumps(content))
    words = "--tensor-model-parallel-size 2 --expert-model-parallel-size 8 --use-torch-fsdp2 --world-size 16".split()  # noqa: SIM905
    lora = "--lora-r 8 --lora-target-modules q_proj --lora-target-parameters mlp.experts.down_proj".split()  # noqa: SIM905
    found = answer(TRANSFORMERS, {"init_from_hf_path": "hf"}, capsys, *words, *lora)
    of_attention = config.hidden_size + config.num_attention_heads * config.head_dim
    of_experts = config.num_experts * (config.hidden_size + config.moe_intermediate_size)
    assert found["model"]["trained_parameters"] == 8 * config.num_hidden_layers * (of_attention + of_experts)
    assert found["experts"] == [f"model.layers.{n}.mlp.experts" for n in range(48)]
    assert "model.layers.47.self_attn.q_proj" in found["columns"]
    assert not any("base_layer" in path for path in (*found["columns"], *found["rows"]))
    dora = ("--lora-target-modules", "q_proj", "--lora-use-dora")
    found = answer(TRANSFORMERS, {"init_from_hf_path": "hf"}, capsys, *words, *dora)
    assert "--lora-use-dora: the magnitudes of 'model.layers.0.self_attn.q_proj' are those of" in found["refusal"]


def test_megatron_stages(folder: Path, config_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--pipeline-model-parallel-size", "2", "--seq-length", "64", "--world-size", "4")
    found = answer(VLM, {"init_from_hf_path": str(config_only)}, capsys, *words)
    assert (found["layout"]["pp"], found["layout"]["dp_replicate"]) == (2, 2)
    first, last = found["stages"]
    assert first["has_embedding"] and first["vision_layers"][0] == 0 and not first["has_head"]
    assert last["has_head"] and last["text_layers"][0] == first["text_layers"][1] + 1
    assert found["model"]["parameters"] > found["model"]["trained_parameters"] > 0  # the tower is frozen by default


def test_adapters_on_megatron(folder: Path, config_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By transformers' and by Megatron's names; the tower is frozen by default, and its layers get none."""
    words = ("--tensor-model-parallel-size", "2", "--seq-length", "64", "--world-size", "2")
    config = AutoConfig.from_pretrained(config_only)
    text, vision = config.get_text_config(), config.vision_config
    of_text = text.num_hidden_layers * (text.hidden_size + text.intermediate_size)
    of_projector = vision.hidden_size * vision.spatial_merge_size**2 + text.hidden_size
    for target, expected in (("mlp.down_proj", of_text), ("linear_fc2", of_text + of_projector)):
        found = answer(VLM, {"init_from_hf_path": str(config_only)}, capsys, *words, "--lora-target-modules", target)
        assert found["model"]["trained_parameters"] == 8 * expected
    found = answer(VLM, {"init_from_hf_path": str(config_only)}, capsys, *words, "--lora-target-modules", "lm_head")
    assert "lm_head is the output layer, which gets no adapter on the Megatron backend" in found["refusal"]


def test_generation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    structure = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32, "text_dim": 16}
    model = {
        "predictor": {"model_id": "wan", "train_from_scratch": True, "config": structure},
        "load_video_features": True,
        "load_text_features": True,
    }
    data = {"dataset_param": {"dataset_type": "feature", "basic_parameters": {"data_path": "gone.jsonl"}}}
    found = answer(SORA, model, capsys, "--world-size", "2", data=data)
    assert found["model"]["class"] == "WanTransformer3DModel" and found["units"] == ["blocks.0", "blocks.1"]
    assert found["layout"]["dp_shard"] == 2


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("--clip-grd", "1"), r"unknown flag '--clip-grd'; did you mean '--clip-grad'\?"),
        (("--use-torch-fsdp2", "--fsdp2-config-path", "fsdp2.yaml"), "'model.layerz.{*}' matches nothing"),
    ],
)
def test_a_refusal_is_the_answer(
    folder: Path, config_only: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], refusal: str
) -> None:
    (folder / "fsdp2.yaml").write_text("sub_modules_to_wrap: ['model.layerz.{*}']\n")
    found = answer(VLM, {"init_from_hf_path": str(config_only)}, capsys, *words)
    assert not found["accepted"]
    assert refusal.replace("\\", "") in found["refusal"]


def test_a_script_of_ones_own_has_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from mindspeed_mm.training import pretrain

    words = ["script.py", "--micro-batch-size", "1", "--lr", "1", "--train-iters", "0", "--dry-run"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as caught:
        pretrain(OWN.data, OWN.model, forward_step_func=OWN.forward_step)
    assert caught.value.code == 1 and "--train-iters" in json.loads(capsys.readouterr().out)["refusal"]


class Own(nn.Module, FSDP2Mixin):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)


def test_adapters_in_a_model_of_ones_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = dataclasses.replace(OWN, model=lambda: Own(), data=lambda: None)
    words = "--micro-batch-size 1 --lr 1e-4 --train-iters 1 --use-torch-fsdp2 --dry-run".split()  # noqa: SIM905
    assert dry_run(recipe, [*words, "--lora-r", "2", "--lora-target-modules", "first"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["trained_parameters"] == 2 * (4 + 8)


def test_only_the_command_line_asks_for_it() -> None:
    assert asks_for_dry_run(["--lr", "1", "--dry-run"]) and not asks_for_dry_run(["--lr", "1"])


def test_samples_and_features(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of what isn't a training, flags and files are read; nothing is opened or written."""
    (folder / "prompts.txt").write_text("A digit.\nAnother one.\n")
    (folder / "model.json").write_text(json.dumps({"predictor": {"model_id": "wan"}}))
    rows = {"dataset_type": "t2v", "basic_parameters": {"data_path": "gone.jsonl"}}
    (folder / "data.json").write_text(json.dumps({"dataset_param": rows}))
    sampling = "--mm-model model.json --prompts prompts.txt --save-path made --size 5 16 16 --lr 1 --dry-run".split()  # noqa: SIM905
    assert inference.main(sampling) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["accepted"], found["prompts"], found["samples"], found["size"]) == (True, 2, 2, [5, 16, 16])
    assert len(found["notices"]) == 1 and "no effect here: --lr:" in found["notices"][0]
    extraction = "--mm-model model.json --mm-data data.json --output features --dry-run".split()  # noqa: SIM905
    assert command.main(extraction) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["accepted"], found["dataset_type"], found["text"], found["notices"]) == (True, "t2v", True, [])
    assert command.main([*extraction, "--micro-batch-size", "0"]) == 1
    assert "--micro-batch-size is 0" in json.loads(capsys.readouterr().out)["refusal"]
    assert not list(folder.glob("made*")) and not list(folder.glob("features*"))
