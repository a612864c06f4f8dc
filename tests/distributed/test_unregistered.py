"""Architectures of transformers that no family folder describes: blocks found, encoders idle on some ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.utils.errors import ConfigError
from tests.support.families import randomize
from tests.support.launch import launch_flags, metrics_of, run_entry, write_run_files
from tests.support.reference import rows_as_inputs, train_reference
from tests.support.tiny import write_mixed_dataset
from tests.support.tiny_text import text_dir
from tests.support.workers import RankError, RankPool

IMAGE_TOKEN = 200


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model without a family folder."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return text_dir(tmp_path_factory.mktemp("olmo2"), Olmo2ForCausalLM, Olmo2Config, {"tie_word_embeddings": False})


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a vision tower and no family folder."""
    from transformers import VipLlavaConfig, VipLlavaForConditionalGeneration

    text = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = VipLlavaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN, vision_feature_layers=[-1, -2]
    )
    path = tmp_path_factory.mktemp("vipllava")
    randomize(VipLlavaForConditionalGeneration(config)).save_pretrained(path)
    return path


def rows(images: list[int]) -> list[dict[str, torch.Tensor]]:
    """One row a rank and micro-batch, with so many images (of four tokens each)."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in images:
        ids = torch.randint(1, 190, (1, 16), generator=generator)
        ids[0, 2 : 2 + 4 * number] = IMAGE_TOKEN
        labels = ids.clone()
        labels[0, :10] = -100
        row = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        if number:
            row["pixel_values"] = torch.randn(number, 3, 28, 28, generator=generator)
        made.append(row)
    return made


def gradients(hf_dir: Path, fsdp2: dict[str, Any], folder: Path, images: list[int]) -> dict[str, torch.Tensor]:
    """Whole gradients of the sum over ranks' rows, by parameter."""
    file = folder / f"fsdp2-{dist.get_rank()}.yaml"
    file.write_text(yaml.safe_dump({"sharding_size": "auto", **fsdp2}))
    model = TransformersModel({"init_from_hf_path": str(hf_dir)})
    model.fully_shard(fsdp2_config_path=str(file))
    own = rows(images)[dist.get_rank()]
    model(**model.prepare(own))["loss"].backward()
    return {name: param.grad.full_tensor() for name, param in model.model.named_parameters() if param.grad is not None}


def reference_gradients(hf_dir: Path, images: list[int]) -> dict[str, torch.Tensor]:
    from transformers import VipLlavaForConditionalGeneration

    model = VipLlavaForConditionalGeneration.from_pretrained(hf_dir, dtype=torch.float32).train()
    for row in rows(images):
        logits = model(**{**row, "labels": None}).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], row["labels"][0, 1:], reduction="sum").backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("images", [[2, 0], [0, 1], [1, 2]])
def test_ranks_may_differ_in_what_an_unknown_tower_gets(
    images: list[int], vision_model: Path, ranks2: RankPool, tmp_path: Path
) -> None:
    """The decoder's blocks are units, the tower is in the root's: gradients as in one process, zeros for the unused."""
    for found in ranks2.run(gradients, vision_model, {}, tmp_path, images):
        expected = reference_gradients(vision_model, images)
        assert expected.keys() <= found.keys()
        for name, grad in found.items():
            wanted = expected.get(name, torch.zeros_like(grad))
            torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-6, msg=name)


def test_an_idle_tower_that_is_a_unit_is_refused(vision_model: Path, tmp_path: Path) -> None:
    wrap = ["model.vision_tower.encoder.layers.{*}", "model.language_model.layers.{*}"]
    with pytest.raises(RankError, match=r"no input for 'model.vision_tower.encoder.layers.0'.*leave out sub_modules"):
        pool = RankPool(2)
        try:
            pool.run(gradients, vision_model, {"sub_modules_to_wrap": wrap}, tmp_path, [1, 0], timeout=30)
        finally:
            pool.close()


def test_every_rank_with_input_may_wrap_the_tower(vision_model: Path, ranks2: RankPool, tmp_path: Path) -> None:
    wrap = ["model.vision_tower.encoder.layers.{*}", "model.language_model.layers.{*}"]
    found = ranks2.run(gradients, vision_model, {"sub_modules_to_wrap": wrap}, tmp_path, [1, 2])[0]
    for name, grad in reference_gradients(vision_model, [1, 2]).items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def wrapped_and_said(hf_dir: Path, folder: Path) -> tuple[list[str], list[str]]:
    from torch.distributed.fsdp import FSDPModule

    from mindspeed_mm.utils import log

    said: list[str] = []
    before, log.logger.warning = log.logger.warning, said.append  # type: ignore[method-assign,assignment]
    try:
        file = folder / "fsdp2.yaml"
        file.write_text("sharding_size: auto\n")
        model = TransformersModel({"init_from_hf_path": str(hf_dir)})
        model.fully_shard(fsdp2_config_path=str(file))
    finally:
        log.logger.warning = before  # type: ignore[method-assign]
    return [name for name, module in model.model.named_modules() if isinstance(module, FSDPModule)], said


def test_the_wrap_list_is_found_and_said(vision_model: Path, ranks2: RankPool, tmp_path: Path) -> None:
    units, said = ranks2.run(wrapped_and_said, vision_model, tmp_path)[0]
    assert units == ["", "model.language_model.layers.0", "model.language_model.layers.1"]
    assert [text for text in said if '["model.language_model.layers.{*}"]' in text and "to copy" in text]


def test_text_steps_equal_transformers(text_model: Path, ranks2: RankPool, tmp_path: Path) -> None:
    """Two steps through the entry script, without a wrap list; packed rows are refused."""
    data = write_mixed_dataset(tmp_path / "rows", rows=8, images=False)
    files = write_run_files(tmp_path / "files", text_model, data)
    flags = {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": 2, "save": tmp_path / "run"}
    ranks2.run(run_entry, launch_flags(files, **flags, no_save_optim=True), timeout=60)
    losses, norms, _ = train_reference(text_model, rows_as_inputs(text_model, data), 2)
    found = metrics_of(tmp_path / "run")
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1] == pytest.approx(norms, rel=1e-5)
    with pytest.raises(ConfigError, match="Olmo2ForCausalLM can't train on packed rows"):
        TransformersModel({"init_from_hf_path": str(text_model)}).check_packing()
