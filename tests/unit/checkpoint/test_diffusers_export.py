"""Diffusers directories: weights come in and go out exactly, alone or with the pipeline that they belong to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint import hf_export
from mindspeed_mm.checkpoint.hf_export import export
from mindspeed_mm.checkpoint.pipeline_folder import component_directory, copy_parts
from mindspeed_mm.checkpoint.sources import open_weights
from mindspeed_mm.checkpoint.start import Start, find_start
from mindspeed_mm.checkpoint.weights import load_weights
from mindspeed_mm.models.common.base_model import adapt_class
from mindspeed_mm.models.common.meta_build import build_on_meta
from mindspeed_mm.models.common.pipeline_layout import PipelineLayout
from mindspeed_mm.parallel.materialize import materialize
from mindspeed_mm.utils.errors import CheckpointError
from tests.support.tiny_diffusers import NAMES, build_diffusers, diffusers_class, diffusers_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A gloo group of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def empty(name: str = "wan") -> Any:
    """A model whose weights are still to come."""
    model = build_on_meta(adapt_class(diffusers_class(name)), diffusers_config(name))
    materialize(model, CPU, CPU)
    return model


def loaded(directory: Path, name: str = "wan") -> Any:
    model = empty(name)
    load_weights(model, open_weights(directory))
    return model


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [None, 10_000], ids=["one file", "shards"])
def test_an_export_is_what_diffusers_itself_writes(
    tmp_path: Path, group: Any, monkeypatch: pytest.MonkeyPatch, name: str, size: int | None
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    real = build_diffusers(name)
    real.save_pretrained(source, max_shard_size=size or "10GB")
    if size:
        monkeypatch.setattr(hf_export, "_LARGEST_FILE", size)
        monkeypatch.setattr(hf_export, "_SMALLEST_FILE", size)
    model = loaded(source, name)
    assert_same(model.state_dict(), real.state_dict())
    export(model, out, str(source), group, None)
    again, info = diffusers_class(name).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert_same(again.state_dict(), real.state_dict())
    theirs, ours = (json.loads((d / "config.json").read_text()) for d in (source, out))
    assert ours == theirs
    index = "diffusion_pytorch_model.safetensors.index.json"
    assert (out / index).is_file() == bool(size)
    if size:
        weight_map = json.loads((out / index).read_text())["weight_map"]
        number = len(set(weight_map.values()))
        assert set(weight_map.values()) == {
            f"diffusion_pytorch_model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)
        }
        assert number > 1
    else:
        assert {p.name for p in out.iterdir()} == {p.name for p in source.iterdir()}


def test_weights_keep_the_dtypes_of_the_source(tmp_path: Path, group: Any) -> None:
    source = tmp_path / "source"
    build_diffusers("wan").to(torch.bfloat16).save_pretrained(source)
    file = source / "diffusion_pytorch_model.safetensors"
    mixed = load_file(file)
    mixed["scale_shift_table"] = mixed["scale_shift_table"].float() + 1e-3
    save_file(mixed, file, {"format": "pt"})
    (source / "diffusion_pytorch_model.safetensors.index.fp16.json").write_text("{}")
    (source / "notes.md").write_text("from the source")
    model = loaded(source)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    export(model, tmp_path / "out", str(source), group, None)
    assert_same(load_file(tmp_path / "out/diffusion_pytorch_model.safetensors"), mixed)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "config.json",
        "diffusion_pytorch_model.safetensors",
        "notes.md",
    }
    export(model, tmp_path / "new", None, group, torch.float16)
    assert {t.dtype for t in load_file(tmp_path / "new/diffusion_pytorch_model.safetensors").values()} == {
        torch.float16
    }


# --- whole pipelines -----------------------------------------------------------------------------------------------


def pixels(pipeline: Any) -> torch.Tensor:
    """A clip of two steps, from the same noise each time."""
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        "a cat runs fast",
        negative_prompt="a dog",
        height=32,
        width=32,
        num_frames=5,
        num_inference_steps=2,
        max_sequence_length=12,
        output_type="pt",
        generator=torch.Generator().manual_seed(1),
    )
    return made.frames


def written_pipeline(folder: Path) -> Any:
    """A tiny Wan pipeline, made of parts in memory, and written by diffusers."""
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
    from transformers import AutoTokenizer, UMT5EncoderModel

    from tests.support.tiny_wan import write_encoders

    write_encoders(folder / "parts")
    pipeline = WanPipeline(
        tokenizer=AutoTokenizer.from_pretrained(folder / "parts/tokenizer"),
        text_encoder=UMT5EncoderModel.from_pretrained(folder / "parts/text_encoder"),
        vae=AutoencoderKLWan.from_pretrained(folder / "parts/vae"),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=build_diffusers("wan"),
    )
    pipeline.save_pretrained(folder / "whole")
    return pipeline


def layout_of(directory: Path) -> PipelineLayout:
    index = json.loads((directory / "model_index.json").read_text())
    names = ("vae", "text_encoder", "tokenizer", "scheduler")
    return PipelineLayout("transformer", {name: directory / name for name in names}, index)


def test_an_exported_pipeline_makes_the_same_pixels(tmp_path: Path, group: Any, said: list[str]) -> None:
    from diffusers import WanPipeline

    pipeline = written_pipeline(tmp_path)
    whole, out = tmp_path / "whole", tmp_path / "out"
    model = loaded(component_directory(whole, "WanTransformer3DModel"))
    expected = pixels(pipeline)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05)
    pipeline.transformer.load_state_dict(model.state_dict())
    export(model, out, str(whole / "transformer"), group, None, layout=layout_of(whole))
    exported = WanPipeline.from_pretrained(out)
    weights = exported.transformer.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    found, trained = pixels(exported), pixels(pipeline)
    assert found.shape == (1, 5, 3, 32, 32)
    # weights mapped from a file are aligned otherwise in memory, and some processors then add in another order
    torch.testing.assert_close(found, trained, atol=1e-5, rtol=0)
    assert not torch.equal(found, expected)
    assert {p.relative_to(out) for p in out.rglob("*")} == {p.relative_to(whole) for p in whole.rglob("*")}
    assert "; scheduler 0.0 MB, text_encoder " in said[-1] and "loads with from_pretrained" in said[-1]
    assert find_start(str(out)) == Start(out)
    # over the directory that it came from
    export(model, whole, str(whole / "transformer"), group, None, layout=layout_of(whole))
    torch.testing.assert_close(pixels(WanPipeline.from_pretrained(whole)), trained, atol=1e-5, rtol=0)


def test_parts_are_copied_and_not_linked(tmp_path: Path) -> None:
    blob, source = tmp_path / "blob", tmp_path / "source"
    save_file({"x": torch.ones(2)}, blob)
    (source / "sub").mkdir(parents=True)
    (source / "model.safetensors").symlink_to(blob)
    for name in ("sub/more.json", "pytorch_model.bin", ".hidden"):
        (source / name).write_text(name)
    layout = PipelineLayout("transformer", {"vae": source, "again": source}, {"_class_name": "WanPipeline"})
    for rank in (0, 1):
        copy_parts(layout, tmp_path / "out", rank, 2)
    files = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    parts = {f"{part}/{name}" for part in ("vae", "again") for name in ("model.safetensors", "sub/more.json")}
    assert files == parts | {"model_index.json"}
    copy = tmp_path / "out/vae/model.safetensors"
    assert not copy.is_symlink() and copy.stat().st_ino != blob.stat().st_ino and copy.stat().st_nlink == 1
    assert copy.read_bytes() == blob.read_bytes()


def test_a_part_that_is_not_there_fails_the_export(tmp_path: Path, group: Any) -> None:
    layout = PipelineLayout("transformer", {"vae": tmp_path / "gone"}, {})
    with pytest.raises(CheckpointError, match=r"part 'vae' can't be copied: '.*gone' is no directory.*nothing is left"):
        export(build_diffusers("wan"), tmp_path / "out", None, group, None, layout=layout)
    assert not list(tmp_path.iterdir())


def test_the_part_of_a_class_is_found_or_asked_for(tmp_path: Path) -> None:
    assert component_directory(tmp_path, "WanTransformer3DModel") == tmp_path
    index = {
        "_class_name": "WanPipeline",
        "boundary_ratio": 0.9,
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "image_encoder": [None, None],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "transformer").mkdir()
    (tmp_path / "vae").mkdir()
    assert component_directory(tmp_path, "WanTransformer3DModel") == tmp_path / "transformer"
    (tmp_path / "transformer_2").mkdir()
    with pytest.raises(CheckpointError, match=r"2 parts of class WanTransformer3DModel: transformer, transformer_2;"):
        component_directory(tmp_path, "WanTransformer3DModel")
    with pytest.raises(CheckpointError, match=r"no part of class FluxTransformer2DModel.*vae \(AutoencoderKLWan\)"):
        component_directory(tmp_path, "FluxTransformer2DModel")
    for text in ("", "[]", "{"):
        (tmp_path / "model_index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"model_index\.json' can't be read"):
            component_directory(tmp_path, "FluxTransformer2DModel")


# --- other layouts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key"),
    [("wan", "blocks.0.self_attn.q.weight"), ("hunyuan", "double_blocks.0.img_attn_qkv.weight")],
)
def test_the_layout_of_a_models_authors_is_sent_to_diffusers(tmp_path: Path, name: str, key: str) -> None:
    save_file({key: torch.ones(24, 24), "patch_embedding.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    model = empty(name)
    with pytest.raises(CheckpointError, match=r"shape|convert them with diffusers") as caught:
        load_weights(model, open_weights(tmp_path))
    save_file({key: torch.ones(24, 24)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"from_single_file\('FILE in .*'\)\.save_pretrained") as caught:
        load_weights(model, open_weights(tmp_path))
    assert key in str(caught.value) and "FSDP" not in str(caught.value)


def test_a_few_misfits_are_listed(tmp_path: Path, said: list[str]) -> None:
    """A weight that diffusers itself doesn't read is no misfit."""
    build_diffusers("wan").save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["blocks.0.attn2.norm_added_q.weight"] = torch.ones(24)
    save_file(weights, file, {"format": "pt"})
    loaded(tmp_path)
    assert "blocks (1)" in said[-1] and "which are not read" in said[-1]
    del weights["scale_shift_table"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of WanTransformer3DModel.*: scale_shift_table; if that"):
        loaded(tmp_path)
