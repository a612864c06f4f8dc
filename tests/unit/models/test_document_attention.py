"""Attention document by document in a whole model, against transformers' own attention under its own masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from mindspeed_mm.accelerator.attention import Documents
from mindspeed_mm.models.common import document_attention
from mindspeed_mm.models.common.document_attention import KEYWORD, DocumentsOfCall
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.parallel.chunk_mbs import ChunkPlan, apply_chunks
from mindspeed_mm.parallel.recompute import apply_recompute
from mindspeed_mm.utils.errors import ConfigError
from tests.support.families import families
from tests.support.packs import make_samples, pack


def model_of(hf_dir: Path, attention: str | None = None) -> TransformersModel:
    return TransformersModel({"init_from_hf_path": str(hf_dir), "attn_implementation": attention})


def rows(hf_dir: Path, mask: list[list[int]] | None) -> dict[str, Any]:
    ids = torch.randint(8, 250, (2, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if mask is not None:
        batch["attention_mask"] = torch.tensor(mask)
        batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


def step(model: TransformersModel, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(**model.prepare(batch))["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Any, expected: Any) -> None:
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).abs().max() < 1e-5 * gradient.abs().max().clamp(min=1e-7), name


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The masks that are made meanwhile."""
    made: list[str] = []
    for name in ("documents_or_sdpa", "documents_or_eager"):
        make = ALL_MASK_ATTENTION_FUNCTIONS[name]

        def watched(*args: Any, name: str = name, make: Any = make, **kwargs: Any) -> Any:
            made.append(name)
            return make(*args, **kwargs)

        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, watched)
    return made


MASKS = {
    "no mask": None,
    "a mask of ones": [[1] * 12] * 2,
    "padding at the end": [[1] * 12, [1] * 7 + [0] * 5],
    "padding at the beginning": [[0] * 3 + [1] * 9, [1] * 12],
    "padding at both ends": [[0] * 3 + [1] * 5 + [0] * 4, [1] * 12],
}


@pytest.mark.parametrize(
    "mask", [pytest.param(name, marks=[] if "both" in name else [pytest.mark.full]) for name in MASKS]
)
def test_padded_rows_need_no_mask(mask: str, qwen3_dir: Path, masks: list[str]) -> None:
    batch = rows(qwen3_dir, MASKS[mask])
    assert_same(step(model_of(qwen3_dir), batch), step(model_of(qwen3_dir, "sdpa"), batch))
    assert not masks


def test_packed_rows_need_no_mask(qwen3_dir: Path, masks: list[str]) -> None:
    samples = make_samples(qwen3_dir)
    batch = pack([samples[:3], samples[3:5]])
    assert_same(step(model_of(qwen3_dir), batch), step(model_of(qwen3_dir, "sdpa"), batch))
    assert not masks


def test_full_attention_beside_linear_attention_needs_no_mask(tmp_path: Path, masks: list[str]) -> None:
    hf_dir = families()["qwen3_5"].make(tmp_path / "hf")
    samples = make_samples(hf_dir)
    batch = pack([[samples[1], samples[4]], [samples[4]]])
    model = model_of(hf_dir)
    assert_same(step(model, batch), step(model_of(hf_dir, "sdpa"), batch))
    assert not masks
    padded = pack([[samples[1]], [samples[4]]])
    padded["attention_mask"] = padded.pop("documents")
    assert KEYWORD not in model.prepare(padded)  # a layer of linear attention is told the padding by the mask


def test_a_mask_with_holes_is_transformers_own(qwen3_dir: Path, masks: list[str]) -> None:
    batch = rows(qwen3_dir, [[1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1], [1] * 12])
    assert_same(step(model_of(qwen3_dir), batch), step(model_of(qwen3_dir, "sdpa"), batch))
    assert masks == ["documents_or_sdpa"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks_see_the_same_documents(reentrant: bool, qwen3_dir: Path) -> None:
    samples = make_samples(qwen3_dir)
    batch = pack([samples[:3], samples[3:5]])
    model = model_of(qwen3_dir)
    apply_recompute({str(n): layer for n, layer in enumerate(model.model.model.layers)}, reentrant)
    assert_same(step(model, batch), step(model_of(qwen3_dir, "sdpa"), batch))


def test_chunks_of_rows_see_their_own_documents(qwen3_dir: Path) -> None:
    samples = make_samples(qwen3_dir)
    batch = pack([samples[:3], samples[3:5]])
    model = model_of(qwen3_dir)
    plan = ChunkPlan(size=1, kwargs=("position_ids", "position_embeddings"))
    apply_chunks({str(n): layer for n, layer in enumerate(model.model.model.layers)}, plan)
    assert_same(step(model, batch), step(model_of(qwen3_dir, "sdpa"), batch))


def test_generation_has_transformers_own_masks(qwen3_dir: Path, masks: list[str]) -> None:
    batch = rows(qwen3_dir, MASKS["padding at the beginning"])
    model, plain = model_of(qwen3_dir).eval(), model_of(qwen3_dir, "sdpa").eval()
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "max_new_tokens": 6}
    answers = [each.model.generate(**given, do_sample=False) for each in (model, plain)]
    assert torch.equal(*answers) and masks


def test_fsdp_hands_the_documents_on_as_they_are() -> None:
    """A copy would keep for itself which layers were called."""
    call = DocumentsOfCall(Documents.in_one_row([3, 4]))
    assert _apply_to_tensors(lambda tensor: tensor.bfloat16(), {KEYWORD: call})[KEYWORD] is call


def test_layers_that_lose_the_documents_are_seen(qwen3_dir: Path) -> None:
    samples, model = make_samples(qwen3_dir), model_of(qwen3_dir)
    model.model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (
            args,
            {k: v for k, v in kwargs.items() if k != KEYWORD} | {"attention_mask": None},
        ),
        with_kwargs=True,
    )
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM: 1 of its 2 attention layers .*attn_implementation: sdpa"):
        model(**model.prepare(pack([samples[:2]])))


@pytest.mark.parametrize("stated", ["sdpa", pytest.param("eager", marks=pytest.mark.full)])
def test_what_is_stated_stays(stated: str, qwen3_dir: Path) -> None:
    model = model_of(qwen3_dir, stated)
    assert model.model.model.config._attn_implementation == stated
    assert KEYWORD not in model.prepare(rows(qwen3_dir, None))


def test_what_can_not_run_is_replaced_by_documents(qwen3_dir: Path) -> None:
    assert model_of(qwen3_dir, "flash_attention_2").model.model.config._attn_implementation == "documents_or_sdpa"


@pytest.mark.parametrize("key", ["attention_dropout", "attn_logit_softcapping"])
def test_what_no_kernel_computes_keeps_its_masks(key: str, qwen3_dir: Path) -> None:
    config = model_of(qwen3_dir, "sdpa").model.config
    assert document_attention.why_not_by_documents(config) is None
    setattr(config, key, 0.5)
    assert key in str(document_attention.why_not_by_documents(config))
