"""An autoencoder named by its file of weights, as published model.json files name that of HunyuanVideo 1.5."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.configs.sora_config import AeConfig, SoRAModelConfig
from mindspeed_mm.models.generation.ae.autoencoder import autoencoder_strides, open_autoencoder, open_file
from mindspeed_mm.tools.feature_extraction.made_from import _files, _structure
from mindspeed_mm.utils.errors import CheckpointError, ConfigError

#: as published, but for the sizes
STRUCTURE = {
    "model_id": "hunyuanvideo_15_vae",
    "latent_channels": 4,
    "block_out_channels": [8, 8, 8, 8, 8],
    "layers_per_block": 1,
    "ffactor_spatial": 16,
    "ffactor_temporal": 4,
    "in_channels": 3,
    "out_channels": 3,
    "downsample_match_channel": True,
    "upsample_match_channel": True,
    "sample_size": 128,
    "scaling_factor": 1.03682,
    "shift_factor": None,
}


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import AutoencoderKLHunyuanVideo15

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("pipeline") / "vae"
    AutoencoderKLHunyuanVideo15(latent_channels=4, block_out_channels=(8,) * 5, layers_per_block=1).save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def lone(vae: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(vae / "diffusion_pytorch_model.safetensors", tmp_path))


def described(place: Path, **keys: Any) -> AeConfig:
    """`ae` as a file describes it."""
    content = {"ae": {"from_pretrained": str(place), **STRUCTURE, **keys}, "predictor": {"model_id": "hunyuanvideo15"}}
    config = SoRAModelConfig.from_dict(content).ae
    assert config is not None
    return config


def test_a_file_gives_its_directory_s_latents(vae: Path, lone: Path, said: list[str]) -> None:
    clip = torch.rand(1, 3, 5, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    expected = open_autoencoder(described(vae), "m.json").encode(clip).mean
    assert any("block_out_channels" in line for line in said)  # of no effect beside a config.json
    said.clear()
    renamed = Path(shutil.copy(lone, vae.parent / "vae" / "other.safetensors"))
    for place in (vae / "diffusion_pytorch_model.safetensors", renamed, lone):
        config = described(place)
        assert autoencoder_strides(config, None, (1, 1)) == (4, 16)
        assert torch.equal(open_autoencoder(config, "m.json").encode(clip).mean, expected)
    renamed.unlink()
    assert not any("ffactor_spatial" in line for line in said[-1:])


def test_what_model_json_leaves_out_is_the_class_s_own(lone: Path) -> None:
    from diffusers import AutoencoderKLHunyuanVideo15

    keys = dict.fromkeys(("ffactor_spatial", "ffactor_temporal", "in_channels", "upsample_match_channel"))
    made = open_file(lone, described(lone, **keys), "m.json")
    assert isinstance(made, AutoencoderKLHunyuanVideo15) and made.config.spatial_compression_ratio == 16


def test_it_is_exported_with_its_configuration(lone: Path, tmp_path: Path) -> None:
    open_file(lone, described(lone), "m.json").save_pretrained(tmp_path / "out")
    written = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(tensor, written[name]) for name, tensor in load_file(lone).items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["block_out_channels"] == [8] * 5


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"model_id": None}, ConfigError, "file without a diffusers config.json beside it; name its class"),
        ({"model_id": "wan_video_vae"}, ConfigError, "'ae.latent_channels', .*AutoencoderKLWan has no such argument"),
        ({"model_id": "nothing"}, ConfigError, "holds a nothing|model_id' is 'nothing'"),
        ({"latent_channels": 8}, CheckpointError, r"has the shape \[.*\], and \[.*\] in the class; .*authors"),
        ({"block_out_channels": [8, 8]}, (CheckpointError, ConfigError), "AutoencoderKLHunyuanVideo15"),
    ],
)
def test_a_file_that_does_not_fit(lone: Path, keys: dict[str, Any], kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        open_autoencoder(described(lone, **keys), "m.json")


def test_another_class_s_tensors(lone: Path) -> None:
    keys = dict.fromkeys(STRUCTURE) | {"model_id": "wan_video_vae"}
    with pytest.raises(CheckpointError, match=r"doesn't fit AutoencoderKLWan: \d+ tensors are missing"):
        open_autoencoder(described(lone, **keys), "m.json")


def test_a_config_json_of_the_authors_says_nothing(lone: Path, said: list[str]) -> None:
    (lone.parent / "config.json").write_text(json.dumps({"latent_channels": 5}))
    assert open_autoencoder(described(lone), "m.json").channels == 4
    assert not any("ae.latent_channels" in line for line in said)


def test_features_know_the_structure_and_the_directory_of_a_file(vae: Path, lone: Path) -> None:
    one, other = (_structure(described(lone, ffactor_temporal=n)) for n in (4, 8))
    assert one != other and _structure(described(vae)) == {} == _structure(None)
    assert _files(str(vae)) == _files(str(vae / "diffusion_pytorch_model.safetensors")) != _files(str(lone))


def test_a_layout_of_the_authors(lone: Path) -> None:
    save_file({f"model.{name}": tensor for name, tensor in load_file(lone).items()}, lone)
    with pytest.raises(CheckpointError, match=r"are missing .*, .* left over .*model's authors is not read"):
        open_autoencoder(described(lone), "m.json")


def test_a_damaged_file(lone: Path) -> None:
    lone.write_bytes(lone.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="can't be read"):
        open_autoencoder(described(lone), "m.json")
