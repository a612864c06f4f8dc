"""Packed rows: their numbers, what reaches across samples and must not, and who refuses them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.backends.packing import check_packing
from mindspeed_mm.configs.packing import asks_for_packing
from mindspeed_mm.configs.run_sections import Batch
from mindspeed_mm.models.common.boundaries import PackedRows
from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.loss import select_targets
from mindspeed_mm.models.common.packed import Unpacked, restarting_positions, run_lengths, take_documents
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.utils.errors import ConfigError, DataError
from tests.support.packs import make_samples, pack
from tests.support.runs import run_of

DOCUMENTS = torch.tensor([[1, 1, 1, 2, 2, 0, 0], [1, 2, 3, 3, 3, 3, 3]])


def with_ids(documents: list[list[int]], **more: Any) -> dict[str, Any]:
    numbers = torch.tensor(documents)
    return {"input_ids": torch.zeros_like(numbers), "documents": numbers, **more}


def test_positions_restart_with_each_sample_and_with_padding() -> None:
    assert restarting_positions(DOCUMENTS).tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 0, 0, 1, 2, 3, 4]]
    assert run_lengths(DOCUMENTS) == [[3, 2, 2], [1, 1, 5]]


def test_samples_are_taken_apart_and_put_back() -> None:
    samples = Unpacked(DOCUMENTS)
    rows = torch.arange(1, 15).view(2, 7)
    apart = samples.take_apart(rows)
    assert apart.tolist() == [[1, 2, 3, 0, 0], [4, 5, 0, 0, 0], [8, 0, 0, 0, 0], [9, 0, 0, 0, 0], [10, 11, 12, 13, 14]]
    assert torch.equal(samples.mask, (apart > 0).long())
    assert torch.equal(samples.put_back(apart.expand(3, -1, -1)), rows.masked_fill(DOCUMENTS == 0, 0).expand(3, -1, -1))


@pytest.mark.parametrize("documents", [[[1, 2, 1]], [[2, 2, 2]], [[1, 3, 3]], [[0, 1, 1]], [[1, 0, 1]], [[1, 1, -1]]])
def test_wrong_numbers_are_refused_with_what_was_found(documents: list[list[int]]) -> None:
    with pytest.raises(DataError, match=r"row 2 of a micro-batch go .*; expected 1, 2, … in order"):
        take_documents(with_ids([[1, 2, 0], *documents]))


def test_a_mask_beside_documents_is_refused() -> None:
    """A mask of ones makes transformers forget the boundaries, without a word."""
    with pytest.raises(DataError, match="leave the mask out"):
        take_documents(with_ids([[1, 2]], attention_mask=torch.ones(1, 2)))
    with pytest.raises(DataError, match=r"\[1, 2\], expected \[1, 3\]"):
        take_documents({"input_ids": torch.zeros(1, 3), "documents": torch.ones(1, 2)})


def test_an_ordinary_mask_stays_one() -> None:
    batch = {"input_ids": torch.zeros(1, 3), "attention_mask": torch.tensor([[1, 1, 0]])}
    assert take_documents(batch) is None and "attention_mask" in batch


@pytest.mark.parametrize("loss_type", ["per_token_loss", "per_sample_loss", "square_loss"])
def test_no_target_reaches_into_the_next_sample(loss_type: Any) -> None:
    """Even if a sample's first token has a label; and a sample's weight is its own, not its row's."""
    labels = torch.full_like(DOCUMENTS, 5)
    targets = select_targets(labels, loss_type, DOCUMENTS)
    assert targets.index.tolist() == [0, 1, 3, 9, 10, 11, 12]
    lengths = torch.tensor([2.0, 2, 1, 4, 4, 4, 4])
    if loss_type == "per_sample_loss":
        assert targets.weights is not None and torch.equal(targets.weights, 1 / lengths)
        assert float(targets.denominator) == 3
    elif loss_type == "square_loss":
        assert targets.weights is not None and torch.equal(targets.weights, lengths.rsqrt())
        assert float(targets.denominator) == pytest.approx(2 * 2**-0.5 + 1 + 4 * 0.5)
    else:
        assert targets.weights is None and float(targets.denominator) == 7


@pytest.fixture
def vl_model(qwen2_5_vl_dir: Path) -> TransformersModel:
    return TransformersModel({"init_from_hf_path": str(qwen2_5_vl_dir)})


def text_model(hf_dir: Path, attention: str | None = None) -> TransformersModel:
    return TransformersModel({"init_from_hf_path": str(hf_dir), "attn_implementation": attention})


def test_positions_have_four_rows_and_leave_no_trace(vl_model: TransformersModel, qwen2_5_vl_dir: Path) -> None:
    """Three rows would be taken for one sample, without a word."""
    samples = make_samples(qwen2_5_vl_dir)
    batch = vl_model.prepare(pack([samples[:3], samples[3:5]]))
    assert batch["position_ids"].shape == (4, *batch["input_ids"].shape)
    assert torch.equal(batch["position_ids"][0], restarting_positions(pack([samples[:3], samples[3:5]])["documents"]))
    assert vl_model.model.model.rope_deltas is None
    text = vl_model.prepare(pack([[samples[1], samples[4]]]))
    assert torch.equal(text["position_ids"][0], text["position_ids"][3])


def test_media_that_do_not_fit_are_said(vl_model: TransformersModel, qwen2_5_vl_dir: Path) -> None:
    samples = make_samples(qwen2_5_vl_dir)
    batch = pack([[samples[0], samples[5]]])
    with pytest.raises(DataError, match="don't fit its media tokens"):
        vl_model.prepare({**batch, "image_grid_thw": batch["image_grid_thw"][:1]})
    with pytest.raises(DataError, match="mm_token_type_ids"):
        vl_model.prepare({k: v for k, v in batch.items() if k != "mm_token_type_ids"})


def test_media_that_nothing_tells_from_text_are_refused(vl_model: TransformersModel, qwen2_5_vl_dir: Path) -> None:
    """Their positions would be a text's, without a word; position ids of the batch's own are taken."""
    sample = make_samples(qwen2_5_vl_dir)[0]
    batch = {key: value for key, value in sample.items() if key != "mm_token_type_ids"}
    with pytest.raises(DataError, match=r"\(image_grid_thw\) but no 'mm_token_type_ids'.*let the batch hold it"):
        vl_model.prepare(batch)
    positions = torch.arange(batch["input_ids"].shape[1]).expand(3, 1, -1)
    assert vl_model.prepare({**batch, "position_ids": positions})["position_ids"] is positions


def test_a_batch_that_was_not_prepared_is_refused(vl_model: TransformersModel, qwen2_5_vl_dir: Path) -> None:
    with pytest.raises(DataError, match="call prepare"):
        vl_model(**pack([make_samples(qwen2_5_vl_dir)[:2]]))


@pytest.mark.parametrize("is_packed", [False, True])
def test_images_and_videos_take_one_pass_of_the_tower(
    is_packed: bool, vl_model: TransformersModel, qwen2_5_vl_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many passes as a rank with images only makes, which would otherwise wait for it; the loss is the same."""
    samples = make_samples(qwen2_5_vl_dir)
    batch = pack([[samples[2]], [samples[3]], [samples[5]]])
    if not is_packed:
        batch["attention_mask"] = batch.pop("documents")
    passes: list[Any] = []
    vl_model.model.model.visual.register_forward_pre_hook(lambda module, args: passes.append(module))
    ready = vl_model.prepare(batch)
    loss = vl_model(**ready)["loss"]
    assert len(passes) == 1 and ready["image_grid_thw"].value.tolist()[:3] == [[1, 2, 8], [2, 4, 2], [3, 2, 4]]
    alone = sum(vl_model(**samples[number])["loss"].detach() for number in (2, 3, 5))
    assert float(loss.detach()) == pytest.approx(float(alone), rel=1e-6)


def test_flash_attention_is_given_the_boundaries(qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the flattened rows: restarting positions are recognised in batches of one row only."""
    boundaries = importlib.import_module("mindspeed_mm.models.common.boundaries")
    monkeypatch.setattr(boundaries, "is_flash_attention_requested", lambda config: True)
    model = text_model(qwen3_dir, "sdpa")
    seen: list[dict[str, Any]] = []
    model.model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    samples = make_samples(qwen3_dir)
    batch = pack([samples[:2], samples[2:3]])
    lengths = [length for row in run_lengths(batch["documents"]) for length in row]
    with pytest.raises(ConfigError, match="lets the samples of a packed row see each other"):
        model(**model.prepare(batch))  # transformers, which is not patched, makes a mask for sdpa
    monkeypatch.setattr(model._boundaries, "_unchecked", set())
    model(**model.prepare(batch))
    (kwargs,) = seen
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert kwargs[name].dtype == torch.int32
        assert kwargs[name].diff().tolist() == lengths
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == max(lengths)
    model.model(input_ids=batch["input_ids"], use_cache=False)
    assert "cu_seq_lens_q" not in seen[-1]  # rows that aren't packed


def test_a_mask_that_lets_samples_see_each_other_ends_the_run(qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    right = modeling.create_causal_mask
    model = text_model(qwen3_dir, "sdpa")
    samples = make_samples(qwen3_dir)
    monkeypatch.setattr(modeling, "create_causal_mask", lambda position_ids, **rest: right(position_ids=None, **rest))
    model(**model.prepare(pack([samples[:1]])))  # nothing to separate
    with pytest.raises(ConfigError, match=r"packing: false in data\.json .*, or attn_implementation: sdpa"):
        model(**model.prepare(pack([samples[:1], samples[1:3]])))
    monkeypatch.setattr(modeling, "create_causal_mask", right)
    model(**model.prepare(pack([samples[:1], samples[1:3]])))


def batch_of(dynamic: bool = False, **basic: Any) -> Batch:
    data = {"dataset_param": {"basic_parameters": basic}}
    return run_of(use_txt_dynamic_batching=dynamic, files={"data": data}).batch


@pytest.mark.parametrize("attention", [None, "sdpa", "eager", pytest.param("flex_attention", marks=pytest.mark.full)])
def test_implementations_that_separate_samples_pass(attention: str | None, qwen3_dir: Path) -> None:
    model = text_model(qwen3_dir, attention)
    model.check_packing()
    samples = make_samples(qwen3_dir)
    with torch.no_grad():
        model(**model.prepare(pack([samples[:2], samples[2:4]])))


def test_who_can_not_separate_samples_refuses_before_the_run(qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = batch_of(packing="true")
    model = text_model(qwen3_dir, "sdpa")
    model.model.config._attn_implementation = "paged|nobody_knows"
    with pytest.raises(ConfigError, match=r"paged\|nobody_knows' gets no mask"):
        check_packing(model, asked)
    monkeypatch.setattr(type(text_model(qwen3_dir).model), "traits", FamilyTraits(parts={"text_decoder": ("",)}))
    model = text_model(qwen3_dir)
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM can't train on packed rows.*packing: false"):
        check_packing(model, asked)
    with pytest.raises(ConfigError, match="can't train on packed rows"):
        model.prepare(pack([make_samples(qwen3_dir)[:2]]))
    with pytest.raises(ConfigError, match="can't train on packed rows"):
        check_packing(model, batch_of(dynamic=True))
    check_packing(model, batch_of())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"basic_parameters": {"packing": True}}, True),
        ({"basic_parameters": {"neat_packing": "yes"}}, True),
        ({"basic_parameters": {}, "attr": {"packing": 1}}, True),
        ({"basic_parameters": {"packing": False}, "attr": {"packing": None}}, False),
        ({"basic_parameters": "own", "attr": ["own"]}, False),
        ("own", False),
    ],
)
def test_which_data_json_packs(data: Any, expected: bool) -> None:
    assert asks_for_packing({"dataset_param": data}) is expected
    assert asks_for_packing(None) is False


def test_a_boundary_is_found_in_any_row() -> None:
    rows = PackedRows.of(torch.tensor([[1, 1, 1, 1], [1, 1, 2, 2]]))
    assert (rows.boundary, rows.longest, rows.cumulative_lengths.tolist()) == ((1, 2), 4, [0, 4, 6, 8])
    assert PackedRows.of(torch.ones(2, 3)).boundary is None
