"""Weights come into a model exactly as transformers brings them, whatever the files' layout; or not at all."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint.lazy import Node, Region
from mindspeed_mm.checkpoint.sources import open_weights
from mindspeed_mm.checkpoint.weights import load_weights, plan_weights
from mindspeed_mm.utils.errors import CheckpointError
from tests.support.canary import Canary
from tests.support.tiny_families import FAMILIES, empty_model, meta_model, reference_tensors, tiny_family_dir

SHARD = 90_000  # bytes: several files for each family


def rewrite(hf_dir: Path, **changes: torch.Tensor | None) -> Path:
    """Put tensors into the weight file, or take them out (None); dots of names are written as double underscores."""
    weights = load_file(hf_dir / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del weights[name]
        else:
            weights[name] = value
    save_file(weights, hf_dir / "model.safetensors", {"format": "pt"})
    return hf_dir


def assert_loaded(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Every parameter, under each of its names, and every persistent buffer: same values, same dtype, same storage
    shared."""
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert {n for n, _ in model.named_parameters()} <= found.keys()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "shard"),
    [(torch.float32, None), (torch.float32, SHARD), (torch.bfloat16, SHARD)],
    ids=["one file", "shards", "bf16 shards"],
)
def test_every_family_loads_as_from_pretrained_does(
    tmp_path: Path, family: str, dtype: torch.dtype, shard: int | None
) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", family, dtype=dtype, max_shard_size=shard)
    assert (hf_dir / "model.safetensors.index.json").is_file() == (shard is not None)
    model = empty_model(hf_dir)
    plan = load_weights(model, open_weights(hf_dir))
    assert plan.problems == 0
    assert_loaded(model, reference_tensors(hf_dir))
    if "tied" in family:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("family", FAMILIES)
def test_a_region_is_that_of_the_whole_weight(tmp_path: Path, family: str) -> None:
    """What a rank reads: its rows, its experts, its part of an inner dimension, its even or uneven share."""
    hf_dir = tiny_family_dir(tmp_path / "hf", family, max_shard_size=SHARD)
    plan = plan_weights(meta_model(hf_dir), open_weights(hf_dir))
    expected = reference_tensors(hf_dir)
    for name, node in plan.values.items():
        for region in regions(expected[name].shape):
            part = expected[name][tuple(slice(s, s + n) for s, n in region)]
            assert torch.equal(node.read(region), part), (name, region)
            out = torch.full(part.shape, torch.nan)
            node.read_into(region, out)
            assert torch.equal(out, part), (name, region)


def regions(shape: torch.Size) -> Iterator[Region]:
    """Shards of each dimension over 2 and 3 ranks, and blocks of several dimensions."""
    draw = random.Random(0)
    full = tuple((0, size) for size in shape)
    yield full
    for dim, size in enumerate(shape):
        for ranks in (2, 3):
            share = -(-size // ranks)
            for start in range(0, size, share):
                yield (*full[:dim], (start, min(share, size - start)), *full[dim + 1 :])
    for _ in range(2):
        starts = [draw.randrange(size) for size in shape]
        yield tuple((start, draw.randint(1, size - start)) for start, size in zip(starts, shape))


def test_a_rank_reads_only_the_experts_it_keeps(tmp_path: Path) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", "qwen3_moe")
    node = plan_weights(meta_model(hf_dir), open_weights(hf_dir)).values["model.layers.1.mlp.experts.gate_up_proj"]
    read = [leaf_log(n) for n in leaves(node)]
    assert len(read) == 8
    node.read_into(((2, 1), (0, 48), (0, 64)), torch.empty(1, 48, 64))
    touched = {name for name, regions_read in read if regions_read}
    assert touched == {f"model.layers.1.mlp.experts.2.{part}_proj.weight" for part in ("gate", "up")}


def leaves(node: Node) -> list[Any]:
    below = node.inputs()
    return [leaf for part in below for leaf in leaves(part)] if below else [node]


def leaf_log(leaf: Any) -> tuple[str, list[Region]]:
    """Keep a record of what is read of a leaf."""
    log: list[Region] = []
    reader = leaf._reader

    def read(name: str, region: Region) -> torch.Tensor:
        log.append(region)
        return reader(name, region)

    leaf._reader = read
    return leaf.name, log


# --- tied weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3 tied", "qwen2_5_vl tied", "internvl tied"])
def test_files_of_a_tied_model_may_hold_the_tied_key_too(tmp_path: Path, family: str) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", family)
    expected = reference_tensors(hf_dir)
    weights = load_file(hf_dir / "model.safetensors")
    embedding = next(n for n in weights if n.endswith("embed_tokens.weight"))
    head = "language_model.lm_head.weight" if family.startswith("internvl") else "lm_head.weight"
    save_file({**weights, head: weights[embedding].clone()}, hf_dir / "model.safetensors")
    model = empty_model(hf_dir)
    load_weights(model, open_weights(hf_dir))
    assert_loaded(model, expected)

    save_file({**weights, head: weights[embedding] + 1}, hf_dir / "model.safetensors")
    model = empty_model(hf_dir)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight and lm_head\.weight are tied.*different values"):
        load_weights(model, open_weights(hf_dir))
    assert all(p.isnan().all() for p in model.parameters())

    del weights[embedding]
    value = expected["lm_head.weight"]
    save_file({**weights, head: value}, hf_dir / "model.safetensors")
    model = empty_model(hf_dir)
    load_weights(model, open_weights(hf_dir))
    assert_loaded(model, expected)


def test_no_weight_of_an_untied_model_stands_for_another(tmp_path: Path) -> None:
    hf_dir = rewrite(tiny_family_dir(tmp_path / "hf", "qwen3"), lm_head__weight=None)
    with pytest.raises(CheckpointError, match=r"lacks 1 of Qwen3ForCausalLM's tensors: lm_head\.weight"):
        load_weights(empty_model(hf_dir), open_weights(hf_dir))


# --- what does not fit ---------------------------------------------------------------------------------------------


def test_a_missing_weight_is_refused_by_name(tmp_path: Path) -> None:
    hf_dir = rewrite(tiny_family_dir(tmp_path / "hf", "qwen3"), model__layers__1__mlp__up_proj__weight=None)
    model = empty_model(hf_dir)
    said = rf"'{hf_dir}' lacks 1 of .*: model\.layers\.1\.mlp\.up_proj\.weight; .*--no-strict-load"
    with pytest.raises(CheckpointError, match=said):
        load_weights(model, open_weights(hf_dir))
    assert all(p.isnan().all() for p in model.parameters())


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", "qwen3_moe")
    rewrite(hf_dir, model__layers__0__mlp__experts__2__down_proj__weight=None)
    model = empty_model(hf_dir)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts"):
        load_weights(model, open_weights(hf_dir))
    assert all(p.isnan().all() for p in model.parameters())


def test_half_of_a_fused_weight_is_refused(tmp_path: Path) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", "qwen3_moe")
    gone = {f"model__layers__0__mlp__experts__{i}__up_proj__weight": None for i in range(4)}
    model = empty_model(rewrite(hf_dir, **gone))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts"):
        load_weights(model, open_weights(hf_dir))
    assert all(p.isnan().all() for p in model.parameters())


def test_a_left_over_weight_is_refused_by_name(tmp_path: Path) -> None:
    hf_dir = rewrite(tiny_family_dir(tmp_path / "hf", "qwen3"), stranger__weight=torch.ones(2))
    model = empty_model(hf_dir)
    with pytest.raises(CheckpointError, match=r"holds 1 that Qwen3ForCausalLM has no place for: stranger\.weight"):
        load_weights(model, open_weights(hf_dir))
    assert all(p.isnan().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("qwen3", "model.layers.0.mlp.down_proj.weight"),
        ("qwen2_5_vl", "visual.blocks.0.mlp.up_proj.weight"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj"),
    ],
)
def test_a_wrong_shape_is_refused_and_nothing_is_changed(tmp_path: Path, family: str, key: str) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", family)
    wrong = load_file(hf_dir / "model.safetensors")[key][..., :-1].clone()
    rewrite(hf_dir, **{key.replace(".", "__"): wrong})
    for strict in (True, False):
        model = empty_model(hf_dir)
        with pytest.raises(CheckpointError) as caught:
            load_weights(model, open_weights(hf_dir), strict=strict)
        assert key.removeprefix("visual.") in str(caught.value)
        assert f"has shape {tuple(wrong.shape)}" in str(caught.value)
        assert all(p.isnan().all() for p in model.parameters())


def test_without_strictness_misfits_are_told_and_the_rest_is_loaded(tmp_path: Path, said: list[str]) -> None:
    hf_dir = rewrite(
        tiny_family_dir(tmp_path / "hf", "qwen3"), model__norm__weight=None, stranger__weight=torch.ones(2)
    )
    model = empty_model(hf_dir)
    with torch.no_grad():
        model.model.norm.weight.fill_(7.0)
    plan = load_weights(model, open_weights(hf_dir), strict=False)
    assert plan.missing == ["model.norm.weight"]
    assert plan.unexpected == ["stranger.weight"]
    assert (model.model.norm.weight == 7.0).all()
    assert torch.equal(model.lm_head.weight, load_file(hf_dir / "model.safetensors")["lm_head.weight"])
    (line,) = said
    assert "lacks 1 of Qwen3ForCausalLM's tensors: model.norm.weight" in line
    assert "holds 1 that Qwen3ForCausalLM has no place for: stranger.weight" in line


def test_downcast_rounds_through_bfloat16_and_keeps_the_dtype(tmp_path: Path) -> None:
    for family in ("qwen3_moe", "qwen2_5_vl tied"):
        hf_dir = tiny_family_dir(tmp_path / family, family)
        model = empty_model(hf_dir)
        load_weights(model, open_weights(hf_dir), downcast=True)
        assert_loaded(model, {n: t.bfloat16().float() for n, t in reference_tensors(hf_dir).items()})


def test_persistent_buffers_are_loaded(tmp_path: Path) -> None:
    """No family here has one; layers of one's own may."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    for value in model.state_dict().values():
        value.random_(0, 100)
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    save_file(expected, tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other = other.to_empty(device="cpu")
    load_weights(other, open_weights(tmp_path))
    assert_loaded(other, expected)
    del expected["1.running_var"]
    save_file(expected, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1\.running_var"):
        load_weights(other, open_weights(tmp_path))


def test_training_does_not_write_into_the_files(tmp_path: Path) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", "qwen3 tied")
    before = (hf_dir / "model.safetensors").read_bytes()
    model = empty_model(hf_dir)
    load_weights(model, open_weights(hf_dir))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert (hf_dir / "model.safetensors").read_bytes() == before
    other = empty_model(hf_dir)
    load_weights(other, open_weights(hf_dir))
    assert_loaded(other, reference_tensors(hf_dir))


def test_weights_that_share_memory_in_a_bin_file_do_not_in_the_model(tmp_path: Path) -> None:
    """A `.bin` saved from a tied model, with a configuration that no longer ties."""
    hf_dir = tiny_family_dir(tmp_path / "hf", "qwen3")
    weights = load_file(hf_dir / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    torch.save(weights, hf_dir / "pytorch_model.bin")
    (hf_dir / "model.safetensors").unlink()
    before = (hf_dir / "pytorch_model.bin").read_bytes()
    model = empty_model(hf_dir)
    load_weights(model, open_weights(hf_dir))
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert torch.equal(model.model.embed_tokens.weight, weights["model.embed_tokens.weight"])
    assert (hf_dir / "pytorch_model.bin").read_bytes() == before


# --- torch_dcp folders ---------------------------------------------------------------------------------------------


def save_dcp(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def vl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A directory, its weights under the names of its files, and under those of the model."""
    hf_dir = tiny_family_dir(tmp_path_factory.mktemp("vl"), "qwen2_5_vl")
    return hf_dir, load_file(hf_dir / "model.safetensors"), reference_tensors(hf_dir)


@pytest.mark.parametrize(
    "prefix",
    [
        *("model.", "", "module.", "model.module.", "model.model.", "state_dict."),
        *("base_model.model.model.", "model.base_model.model.model."),  # of published bases for LoRA
    ],
)
@pytest.mark.parametrize("layout", ["older", "nested"])
def test_both_layouts_of_a_torch_dcp_folder_load_under_any_prefix(
    tmp_path: Path, vl: tuple[Path, dict[str, Any], dict[str, Any]], layout: str, prefix: str
) -> None:
    """K03: visual.* and model.* of transformers 4, or model.visual.* and model.language_model.* of transformers 5."""
    hf_dir, older, nested = vl
    weights = older if layout == "older" else nested
    folder = save_dcp(tmp_path / "dcp", {prefix + n: t for n, t in weights.items()})
    model = empty_model(hf_dir)
    assert load_weights(model, open_weights(folder)).problems == 0
    assert_loaded(model, nested)


@pytest.mark.parametrize("layout", ["older", "nested"])
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_one_missing_key_is_refused_in_either_layout(
    tmp_path: Path, vl: tuple[Path, dict[str, Any], dict[str, Any]], layout: str, prefix: str
) -> None:
    """K03: strict on any missing key, never random weights instead."""
    hf_dir, older, nested = vl
    gone = "visual.merger.mlp.0.weight" if layout == "older" else "model.visual.merger.mlp.0.weight"
    weights = {n: t for n, t in (older if layout == "older" else nested).items() if n != gone}
    folder = save_dcp(tmp_path / "dcp", {prefix + n: t for n, t in weights.items()})
    model = empty_model(hf_dir)
    with pytest.raises(CheckpointError, match=r"lacks 1 of .*: model\.visual\.merger\.mlp\.0\.weight"):
        load_weights(model, open_weights(folder))
    assert all(p.isnan().all() for p in model.parameters())


@pytest.mark.parametrize("family", ["qwen2_5_vl tied", "qwen3_moe", "qwen3_vl_moe", "internvl tied"])
def test_what_torch_saves_of_a_model_loads(tmp_path: Path, family: str) -> None:
    """No manifest, no state.json, tied weights under both names: `dcp.save` and nothing else."""
    hf_dir = tiny_family_dir(tmp_path / "hf", family)
    model = empty_model(hf_dir)
    load_weights(model, open_weights(hf_dir))
    folder = save_dcp(tmp_path / "dcp", {"model": model.state_dict()})
    other = empty_model(hf_dir)
    assert load_weights(other, open_weights(folder)).problems == 0
    assert_loaded(other, reference_tensors(hf_dir))


def test_pickled_entries_beside_the_weights_are_never_read(
    tmp_path: Path, vl: tuple[Path, dict[str, Any], dict[str, Any]]
) -> None:
    hf_dir, _, nested = vl
    state = {"model": nested, "rng": Canary(tmp_path / "ran"), "args": {"lr": 1.0}, "model_extra": [1, 2]}
    folder = save_dcp(tmp_path / "dcp", state)
    model = empty_model(hf_dir)
    load_weights(model, open_weights(folder))
    assert_loaded(model, nested)
    assert not (tmp_path / "ran").exists()


def test_a_torch_dcp_folder_with_different_values_for_tied_weights_is_refused(tmp_path: Path) -> None:
    """A run that trained both, loaded with a configuration that ties them, would lose one without a word."""
    hf_dir = tiny_family_dir(tmp_path / "hf", "qwen3 tied")
    weights = reference_tensors(hf_dir)
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    model = empty_model(hf_dir)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight and lm_head\.weight are tied.*different values"):
        load_weights(model, open_weights(save_dcp(tmp_path / "dcp", weights)))
    assert all(p.isnan().all() for p in model.parameters())


def test_the_optimizer_of_a_run_is_not_taken_for_weights(
    tmp_path: Path, vl: tuple[Path, dict[str, Any], dict[str, Any]]
) -> None:
    hf_dir, _, nested = vl
    state = {f"model.{n}": t for n, t in nested.items()} | {f"optimizer.{n}.exp_avg": t for n, t in nested.items()}
    model = empty_model(hf_dir)
    load_weights(model, open_weights(save_dcp(tmp_path / "dcp", state)))
    assert_loaded(model, nested)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    qwen3, moe = (tiny_family_dir(tmp_path / family, family) for family in ("qwen3", "qwen3_moe"))
    with pytest.raises(CheckpointError, match=r"lacks \d+ of Qwen3MoeForCausalLM's tensors.* and holds \d+"):
        load_weights(empty_model(moe), open_weights(qwen3))
    config = json.loads((qwen3 / "config.json").read_text())
    wider = shutil.copytree(qwen3, tmp_path / "wider")
    (wider / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(CheckpointError, match=r"needs \((128, 64|64, 128)\) \(6 such tensors\); the model's config"):
        load_weights(empty_model(wider), open_weights(qwen3))
