"""Weights in and out: random ones that don't depend on the layout, exports that load with transformers alone."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir, write_mixed_dataset
from tests.support.tiny_families import weights_in
from tests.support.workers import RankError, RankPool, run_ranks


def export(
    pool: Any,
    folder: Path,
    hf_dir: Path,
    model: dict[str, Any],
    wrap: list[str] = WRAP,
    images: bool = True,
    **flags: Any,
) -> dict[str, torch.Tensor]:
    """Train one step with a learning rate of 0 and return the exported weights."""
    data = write_mixed_dataset(folder / "data", rows=4, seed=1, images=images)
    files = write_run_files(folder, hf_dir, data, model=model, fsdp2={"sub_modules_to_wrap": wrap})
    settings = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 1, "save": folder / "run", "lr": 0.0}
    words = launch_flags(files, **{**settings, "weight_decay": 0.0, "save_hf": True, "no_save_optim": True, **flags})
    pool.run(run_entry, words, timeout=120)
    return load_file(folder / "run/hf/model.safetensors")


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_random_weights_do_not_depend_on_the_layout(
    ranks2: RankPool, ranks4: RankPool, tmp_path: Path, tie: bool
) -> None:
    hf_dir = tiny_qwen2_5_vl_dir(tmp_path / "hf", tie=tie, weights=False)
    scratch = {"train_from_scratch": True}
    runs = [
        export(ranks2, tmp_path / "two", hf_dir, scratch),
        export(ranks2, tmp_path / "meta", hf_dir, scratch, init_model_with_meta_device=True),
        export(ranks4, tmp_path / "four", hf_dir, scratch, init_model_with_meta_device=True),
        export(ranks2, tmp_path / "seed", hf_dir, scratch, seed=43),
    ]
    for other in runs[1:3]:
        assert other.keys() == runs[0].keys()
        assert all(torch.equal(other[k], v) for k, v in runs[0].items())
    embedding = next(k for k in runs[0] if k.endswith("embed_tokens.weight"))
    assert not torch.equal(runs[3][embedding], runs[0][embedding])
    assert runs[0][embedding].std() == pytest.approx(0.02, rel=0.05)
    assert ("lm_head.weight" in runs[0]) == (not tie)


def test_meta_init_buffers_are_those_of_a_plain_load(ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path) -> None:
    """F06: every buffer, persistent or not, bit-equal and fp32 on every rank, under bf16 compute."""
    import transformers

    plain = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(qwen2_5_vl_dir)
    expected = {n: b for n, b in plain.named_buffers()}
    for found in ranks2.run(meta_buffers, str(qwen2_5_vl_dir), timeout=120):
        assert found.keys() == expected.keys()
        for name, buffer in expected.items():
            assert found[name].dtype == buffer.dtype
            assert torch.equal(found[name], buffer), name


def meta_buffers(hf_dir: str) -> dict[str, torch.Tensor]:
    """Build on meta, shard, load; return this rank's buffers."""
    from mindspeed_mm.checkpoint.sources import open_weights
    from mindspeed_mm.checkpoint.weights import load_weights
    from mindspeed_mm.models.transformers_model import TransformersModel

    with torch.device("meta"):
        model = TransformersModel({"init_from_hf_path": hf_dir})
    model.weights_come_later = True
    model.fsdp2_overrides = {"param_dtype": "bf16", "sub_modules_to_wrap": WRAP, "sharding_size": "auto"}
    model.fully_shard()
    load_weights(model.model, open_weights(hf_dir))
    return {n: b.clone() for n, b in model.model.named_buffers()}


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_export_loads_with_transformers_alone(ranks2: RankPool, tmp_path: Path, tie: bool) -> None:
    """K01, K10: weights unchanged by a step of rate 0; keys, config, processor, tokenizer, generation config are
    there."""
    import transformers

    hf_dir = tiny_qwen2_5_vl_dir(tmp_path / "hf", seed=7, tie=tie)
    exported = export(ranks2, tmp_path / "run", hf_dir, {})
    source = load_file(hf_dir / "model.safetensors")
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[k], v) for k, v in source.items())
    folder = tmp_path / "run/run/hf"
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tie
    assert type(transformers.AutoProcessor.from_pretrained(folder)).__name__ == "Qwen2_5_VLProcessor"
    before, after = (json.loads((d / "config.json").read_text()) for d in (hf_dir, folder))
    for key in ("architectures", "dtype", "tie_word_embeddings", "model_type"):
        assert after.get(key) == before.get(key)
    assert after["text_config"].get("use_cache") == before["text_config"].get("use_cache")
    assert (folder / "generation_config.json").exists()


def qwen3_moe_dir(path: Path, dtype: torch.dtype) -> Path:
    """A Qwen3-MoE directory: the hub has one tensor an expert, the model has them stacked."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(tiny_qwen3_dir(path, tie=False))
    shape = {k: getattr(config, k) for k in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim")}
    moe = transformers.Qwen3MoeConfig(
        **shape,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=5,  # an odd number: the ranks' parts differ
        num_experts_per_tok=2,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
    )
    torch.manual_seed(3)
    transformers.Qwen3MoeForCausalLM(moe).to(dtype).save_pretrained(path, max_shard_size="100KB")
    (path / "model.safetensors").unlink()
    return path


@pytest.mark.parametrize("kind", ["tied", "untied", "experts", "experts in bf16"])
def test_text_models_go_through_two_ranks_unchanged(ranks2: RankPool, tmp_path: Path, kind: str) -> None:
    """The hub's keys, dtypes and bytes; a model that from_pretrained makes of them equals that of the source."""
    import transformers

    hf_dir = tmp_path / "hf"
    if kind.startswith("experts"):
        qwen3_moe_dir(hf_dir, torch.bfloat16 if kind.endswith("bf16") else torch.float32)
    else:
        tiny_qwen3_dir(hf_dir, seed=7, tie=kind == "tied")
    source = weights_in(hf_dir)
    exported = export(ranks2, tmp_path / "run", hf_dir, {}, WRAP_TEXT, images=False)
    assert exported.keys() == source.keys()
    assert all(v.dtype == source[k].dtype and torch.equal(v, source[k]) for k, v in exported.items())
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(d, output_loading_info=True)
        for d in (hf_dir, tmp_path / "run/run/hf")
    ]
    assert not models[1][1]["missing_keys"] and not models[1][1]["unexpected_keys"]
    before, after = (model.state_dict() for model, _ in models)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[k], v) and after[k].dtype == v.dtype for k, v in before.items())


def run_with_small_files(words: list[str], failures: int) -> None:
    """Run the entry script; exports have many small files, and rank 1's first `failures` tensors meet a full disk."""
    from mindspeed_mm.checkpoint import hf_export

    write, left = hf_export.SafetensorsWriter.write, [failures if os.environ["RANK"] == "1" else 0]

    def failing(self: Any, name: str, tensor: torch.Tensor) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_export, "_SMALLEST_FILE", 1)
        patch.setattr(hf_export, "_LARGEST_FILE", 100_000)
        patch.setattr(hf_export.SafetensorsWriter, "write", failing)
        run_entry(words)


def test_an_export_that_fails_on_a_rank_is_told_and_leaves_nothing(
    ranks2: RankPool, qwen2_5_vl_dir: Path, tmp_path: Path
) -> None:
    """On a rank that writes part of the files; training goes on and exports again when it is due."""
    data = write_mixed_dataset(tmp_path / "data", rows=4, seed=1)
    files = write_run_files(tmp_path, qwen2_5_vl_dir, data, fsdp2={"sub_modules_to_wrap": WRAP})
    run = tmp_path / "run"
    settings = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 3, "save": run, "save_hf": 1}
    words = launch_flags(files, **settings, save_interval=1, no_save_optim=True)
    ranks2.run(run_with_small_files, words, 1, timeout=120)
    assert len(metrics_of(run)[0]) == 3
    assert sorted(p.name for p in run.iterdir() if "hf" in p.name) == ["hf", "hf_iter_0000002", "hf_iter_0000003"]
    assert len(list((run / "hf").glob("model-*.safetensors"))) > 4
    index = json.loads((run / "hf/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == weights_in(run / "hf").keys() == weights_in(qwen2_5_vl_dir).keys()
    elsewhere = [str(tmp_path / "again") if word == str(run) else word for word in words]
    with pytest.raises(RankError, match="No space left on device"):
        ranks2.run(run_with_small_files, [*elsewhere, "--on-save-failure", "exit"], 1)


def test_import_is_free_of_megatron() -> None:
    """The FSDP2 backend never imports megatron-core (7 s)."""
    assert run_ranks(imported_megatron, 1) == [[]]


def imported_megatron() -> list[str]:
    """Names of megatron modules that the entry script's imports brought in."""
    import sys

    import mindspeed_mm.models.transformers_model
    import mindspeed_mm.training  # noqa: F401

    return [name for name in sys.modules if name.split(".")[0] == "megatron"]
