"""Published files and flags of Wan 2.1, Wan 2.2 and HunyuanVideo 1.5 are taken as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.generation.diffusion.build import build_objective
from mindspeed_mm.models.generation.sora_model import SoRAModel, generation_rule
from mindspeed_mm.tasks.train.generation import SORA
from tests.support.runs import described_args
from tests.unit.configs.published_sora import (
    FLAGS,
    FSDP2_FLAGS,
    LAYERZERO_FLAGS,
    MEGATRON_FLAGS,
    WAN,
    clips_data,
    feature_data,
    hunyuan_model,
    wan_model,
)

NAMES = [*WAN, "hunyuanvideo_1.5/t2v", "hunyuanvideo_1.5/i2v"]
FLAGS_OF = {"megatron": MEGATRON_FLAGS, "fsdp2": FSDP2_FLAGS, "layerzero": LAYERZERO_FLAGS}


def published(name: str, folder: str = "./weights") -> tuple[dict[str, Any], dict[str, Any]]:
    """model.json and data.json."""
    if name.startswith("hunyuan"):
        return hunyuan_model(name[-3:], folder), clips_data(2, folder)
    content = wan_model(name, folder)
    return content, feature_data() if content["load_video_features"] else clips_data(1, folder)


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def wan_parameters(hidden: int, ffn: int, layers: int, channels: int, out: int, image: int | None) -> int:
    """Of a Wan transformer: Wan's technical report, section 4.2, and its configuration files.

    A block is two attentions (four projections, norms of queries and keys over the whole width), a norm with weights
    between them, a feed-forward net and six vectors that the timestep's are added to. With a picture the second
    attention has keys and values of it, with a norm of the keys.
    """
    attention = 4 * linear(hidden, hidden) + 2 * hidden
    block = 2 * attention + 2 * hidden + linear(hidden, ffn) + linear(ffn, hidden) + 6 * hidden
    outside = linear(channels * 4, hidden) + linear(hidden, out * 4) + 2 * hidden
    outside += linear(256, hidden) + linear(hidden, hidden) + linear(hidden, 6 * hidden)
    outside += linear(4096, hidden) + linear(hidden, hidden)
    if image is not None:
        block += 2 * linear(hidden, hidden) + hidden
        outside += 2 * image + linear(image, image) + linear(image, hidden) + 2 * hidden
    return layers * block + outside


def on_meta(content: dict[str, Any]) -> SoRAModel:
    with build_context(BuildContext(defer_weights=True)):
        return SoRAModel(content)


COUNTS = {
    "wan2.1/1.3b/t2v": 1_418_996_800,
    "wan2.1/1.3b/i2v": wan_parameters(1536, 8960, 30, 36, 16, 1280),
    "wan2.1/14b/t2v": 14_288_491_584,
    "wan2.1/14b/i2v": wan_parameters(5120, 13824, 40, 36, 16, 1280),
    "wan2.2/5B": wan_parameters(3072, 14336, 30, 48, 48, None),
    "wan2.2/A14B/t2v": 14_288_491_584,
    "wan2.2/A14B/i2v": wan_parameters(5120, 13824, 40, 36, 16, None),
    "hunyuanvideo_1.5": 8_326_608_160,
}


def test_the_arithmetic_is_that_of_known_sizes() -> None:
    assert wan_parameters(1536, 8960, 30, 16, 16, None) == COUNTS["wan2.1/1.3b/t2v"]
    assert wan_parameters(5120, 13824, 40, 16, 16, None) == COUNTS["wan2.1/14b/t2v"]
    assert round(COUNTS["wan2.1/14b/i2v"] / 1e9, 1) == 16.4 and round(COUNTS["wan2.2/5B"] / 1e9, 1) == 5.0


@pytest.mark.parametrize("name", NAMES)
def test_a_model_builds_with_its_published_number_of_parameters(name: str) -> None:
    content, _ = published(name)
    model = on_meta(content)
    [expected] = [count for prefix, count in COUNTS.items() if name.startswith(prefix)]
    assert sum(p.numel() for p in model.predictor.parameters()) == expected
    of_pictures = {"wan2.2/5B/ti2v": "ti2v"}.get(name, "i2v")
    assert model.family.task == (of_pictures if content["task"] == "i2v" else "t2v")


def test_names_of_layers_for_adapters_are_layers_of_the_class() -> None:
    model = on_meta(wan_model("wan2.1/14b/i2v"))
    layers = [path for path, module in model.predictor.named_modules() if isinstance(module, torch.nn.Linear)]
    for published, own in model.family.older_layers.items():
        found = [path for path in layers if path.endswith(f".{own}")]
        # each block has two attentions, of which the second one has keys and values of a picture
        expected = 40 if published.startswith(("ffn", "k_img", "v_img")) else 80
        assert len(found) == expected, published


@pytest.mark.parametrize("name", NAMES)
def test_files_are_taken(name: str, said: list[str]) -> None:
    content, of_data = published(name)
    config = SoRAModelConfig.from_dict(content)
    data = GenerationDataConfig.from_dict(of_data)
    rule = generation_rule(config, 1)
    assert (rule.temporal_stride, rule.spatial_multiple) == (4, 16)
    if data.dataset_param.dataset_type != "feature":
        param = data.dataset_param.preprocess_parameters
        assert rule.fits(param.num_frames, param.max_height, param.max_width)
    assert all("no effect" in line for line in said) and len(said) < 25
    # nothing of a diffusion process is left out but what samples
    left_out = " ".join(line for line in said if "sampling" in line)
    assert "shift" not in left_out and "snr" not in left_out


def test_timesteps_are_those_of_training() -> None:
    low = SoRAModelConfig.from_dict(wan_model("wan2.2/A14B/t2v/low"))
    assert (low.diffusion.min_timestep_boundary, low.diffusion.max_timestep_boundary) == (0.417, 1.0)
    model = on_meta(hunyuan_model("t2v"))
    objective = build_objective(model.described.diffusion, model.family.defaults, "model.json")
    # 3 in training (7 is for sampling), logit-normal: the median draw, 0.5, is moved to 3 · 0.5 / (1 + 2 · 0.5)
    sigmas = objective.sigmas(torch.tensor([0.5], dtype=torch.float64), 100)  # type: ignore[attr-defined]
    torch.testing.assert_close(sigmas, torch.tensor([0.75], dtype=torch.float64))


@pytest.mark.parametrize("launch", FLAGS_OF)
@pytest.mark.parametrize("name", ["wan2.1/1.3b/t2v", "hunyuanvideo_1.5/i2v"])
def test_a_launch_is_described(
    launch: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(variable, value)
    weights = tmp_path / "weights"
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2", "image_encoder", "tokenizer", "tokenizer_2"):
        (weights / part).mkdir(parents=True)
        (weights / part / "config.json").write_text("{}")
    glyphs = tmp_path / "Glyph-SDXL-v2" / "checkpoints" / "byt5_model.pt"
    glyphs.parent.mkdir(parents=True)
    glyphs.touch()
    of_model, of_data = published(name)
    Path("model.json").write_text(json.dumps(of_model))
    Path("data.json").write_text(json.dumps(of_data))
    Path("tools.json").write_text("{}")
    Path("layerzero.yaml").write_text("")
    paths = "--mm-model model.json --mm-data data.json --mm-tool tools.json --load weights/transformer --save save"
    words = f"{FLAGS} {FLAGS_OF[launch]} {paths}".split()
    args = described_args(words, SORA)
    assert (args.use_torch_fsdp2, args.data_parallel_size, args.num_microbatches) == (True, 8, 1)
    assert (args.lr, args.clip_grad, args.adam_beta2, args.lr_decay_style) == (1e-5, 0.0, 0.999, "constant")
    assert any("is implied" in line for line in said) == (launch != "fsdp2")
