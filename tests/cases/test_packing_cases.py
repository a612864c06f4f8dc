"""Cases of packing, and of images that aren't square, on both backends against transformers' own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.megatron import start
from tests.support.packs import make_samples, pack
from tests.support.tiny import tiny_qwen2_5_vl_dir
from tests.support.workers import RankPool

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2_5_vl_dir(tmp_path_factory.mktemp("packing_cases") / "hf", seed=3, deep=True)


def load_reference(hf_dir: Path) -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(hf_dir, dtype=torch.float32).train()


def build_megatron(hf_dir: Path, reference: Any) -> Any:
    """VLModel in one process, with the reference's weights."""
    from mindspeed_mm.checkpoint.lazy import leaf
    from mindspeed_mm.checkpoint.megatron.parts import local_parameters, parameter_parts
    from mindspeed_mm.checkpoint.megatron.weights import fill
    from mindspeed_mm.models.common.families import require_megatron_form
    from mindspeed_mm.models.common.modelzoo import ModelHub
    from mindspeed_mm.models.megatron.vlm_model import VLModel
    from mindspeed_mm.models.transformers.meta_model import build_meta_model
    from mindspeed_mm.parallel.pipeline import plan_stages
    from mindspeed_mm.parallel.sizes import ParallelSizes

    config = reference.config
    (stage,) = plan_stages(1, None, text_layers=4, vision_layers=4)
    meta_model = build_meta_model(ModelHub.get(None, config), config)
    model = VLModel(config, require_megatron_form("qwen2_5_vl"), ParallelSizes(), stage, meta_model)
    weights = {n: p.detach() for n, p in reference.named_parameters()}

    def read(name: str, region: Any) -> torch.Tensor:
        return weights[name][tuple(slice(s, s + n) for s, n in region)]

    values = {n: leaf(n, w.shape, w.dtype, read).node for n, w in weights.items()}
    fill(parameter_parts(local_parameters([model], {n: tuple(w.shape) for n, w in weights.items()}, 0, 1)), values)
    return model


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@torch.no_grad()
def packed_logits(hf_dir: Path, backend: str, form: str) -> dict[str, Any]:
    """What differs, of two samples with images in one row with padding: logits, positions, positions transposed."""
    if backend == "megatron":
        start()
    reference = load_reference(hf_dir)
    samples = [make_samples(hf_dir)[number] for number in (0, 5)]
    lengths = [s["input_ids"].shape[1] for s in samples]
    batch = pack([samples], length=sum(lengths) + 3)
    numbers = batch["documents"]
    if form == "attention_mask":
        batch["attention_mask"] = batch.pop("documents")
    if backend == "megatron":
        model = build_megatron(hf_dir, reference)
        ready = model.prepare(batch)
        logits = model(**{k: v for k, v in ready.items() if k not in ("labels", "targets")})
        positions = ready["position_ids"]
    else:
        from mindspeed_mm.models.transformers_model import TransformersModel

        model = TransformersModel({"init_from_hf_path": str(hf_dir)})
        ready = model.prepare(batch)
        logits = model(**{k: v for k, v in ready.items() if k != "labels"}).logits
        positions = ready["position_ids"][1:]
    found: dict[str, Any] = {"row": numbers[0].unique_consecutive().tolist(), "logits": [], "positions": []}
    for place, length, sample in zip((0, lengths[0]), lengths, samples, strict=True):
        part = slice(place, place + length)
        features = {k: v for k, v in sample.items() if k != "labels"}
        found["logits"].append(relative(logits[:, part], reference(**features).logits))
        expected = reference.model.get_rope_index(
            **{k: v for k, v in features.items() if k not in ("pixel_values", "attention_mask")}
        )[0]
        found["positions"].append(torch.equal(positions[..., part], expected))
    return found


@pytest.mark.parametrize("form", ["documents", "attention_mask"])
@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_packed_samples_with_images_are_as_each_alone(
    backend: str, form: str, hf_dir: Path, ranks1: RankPool, megatron_pools: dict[int, RankPool]
) -> None:
    """P01: two samples with images in one row, 1, 1, 2, 2, 0: logits as unpacked, positions restart."""
    pool = megatron_pools[1] if backend == "megatron" else ranks1
    (found,) = pool.run(packed_logits, hf_dir, backend, form, timeout=60)
    assert found["row"] == [1, 2, 0]
    assert found["positions"] == [True, True]
    assert max(found["logits"]) < TOLERANCE


@torch.no_grad()
def encode_image(hf_dir: Path, backend: str) -> dict[str, Any]:
    """The tower's output for an image of 28 by 112 pixels, and for the same patches laid out as 112 by 28."""
    if backend == "megatron":
        start()
    from transformers import AutoProcessor

    pixels = np.random.RandomState(0).randint(0, 256, (28, 112, 3), dtype=np.uint8)
    processor = AutoProcessor.from_pretrained(hf_dir)
    inputs = processor.image_processor([Image.fromarray(pixels)], return_tensors="pt")
    patches, grid = inputs["pixel_values"], inputs["image_grid_thw"]
    reference = load_reference(hf_dir)
    for name, param in reference.named_parameters():
        param.mul_(20 if "attn.qkv.weight" in name else 1)  # random weights as small as these hardly see positions
    expected = reference.model.visual(patches, grid_thw=grid).pooler_output
    transposed = reference.model.visual(patches, grid_thw=grid[:, [0, 2, 1]]).pooler_output
    if backend == "megatron":
        from mindspeed_mm.models.megatron.vision.qwen2_5_vl import PatchLayout

        layout = PatchLayout.of_grids(grid, reference.config.vision_config)
        found = build_megatron(hf_dir, reference).image_encoder(patches, layout).squeeze(1)
    else:
        from mindspeed_mm.models.transformers_model import TransformersModel

        model = TransformersModel({"init_from_hf_path": str(hf_dir)})
        model.model.load_state_dict(reference.state_dict())
        found = model.model.model.visual(patches, grid_thw=grid).pooler_output
    return {"grid": grid.tolist(), "same": relative(found, expected), "transposed": relative(found, transposed)}


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_positions_of_a_wide_image_are_not_transposed(
    backend: str, hf_dir: Path, ranks1: RankPool, megatron_pools: dict[int, RankPool]
) -> None:
    """I12: a 28 by 112 image through the vision tower is what transformers makes of it, and not the transposed one."""
    pool = megatron_pools[1] if backend == "megatron" else ranks1
    (found,) = pool.run(encode_image, hf_dir, backend, timeout=60)
    assert found["grid"] == [[1, 2, 8]]
    assert found["same"] < TOLERANCE
    assert found["transposed"] > 1e-2
