"""Frozen weights in param_dtype: half the bytes, and the run, its checkpoints and its exports as with float32."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.support import trained_wan
from tests.support.launch import WRAP, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import tiny_qwen2_5_vl_dir, write_mixed_dataset
from tests.support.trained_wan import Generator, write_wan_dir
from tests.support.workers import RankPool

# a whole tower, and one of several parameters of blocks whose others are trained
FREEZE = {"freeze": ["model.visual", "model.language_model.layers.{*}.mlp.up_proj"]}
BF16 = {"param_dtype": "bf16", "sub_modules_to_wrap": WRAP}


def directory_of(path: Path, dtype: torch.dtype) -> Path:
    """Qwen2.5-VL with weights of `dtype`."""
    tiny_qwen2_5_vl_dir(path, seed=3)
    store_in(path / "model.safetensors", dtype)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"float32"', f'"{str(dtype)[6:]}"'))
    return path


def store_in(file: Path, dtype: torch.dtype) -> None:
    save_file({name: value.to(dtype) for name, value in load_file(file).items()}, file, metadata={"format": "pt"})


def bytes_of_run(words: list[str], narrows: bool = True) -> tuple[dict[str, int], list[str]]:
    """Run the script; bytes of this rank's parameters after it, of frozen ones by their dtype, and what was noticed.

    Args:
        narrows: False: frozen parameters stay in float32.
    """
    from mindspeed_mm.backends.fsdp2 import FSDP2Backend
    from mindspeed_mm.parallel import frozen

    found: Counter[str] = Counter()
    apply = FSDP2Backend.apply

    def measured(self: Any, *args: Any) -> None:
        found.clear()
        for param in self._root.parameters():
            assert isinstance(param, DTensor)
            local = param._local_tensor
            found["trained" if param.requires_grad else str(local.dtype)] += local.numel() * local.itemsize
        apply(self, *args)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FSDP2Backend, "apply", measured))
        notice = stack.enter_context(mock.patch.object(frozen, "notice"))
        if not narrows:
            stack.enter_context(mock.patch.object(FSDP2Backend, "_frozen_dtype", lambda self: None))
        run_entry(words)
    return dict(found), [call.args[0] for call in notice.call_args_list]


def words_of(folder: Path, hf_dir: Path, save: Path, fsdp2: dict[str, Any] | None = None, **flags: Any) -> list[str]:
    data = folder / "data" / "data.json"
    if not data.exists():
        write_mixed_dataset(folder / "data", rows=8, seed=5)
    files = write_run_files(folder / "files", hf_dir, data, model=FREEZE, fsdp2={**BF16, **(fsdp2 or {})})
    return launch_flags(
        files, micro_batch_size=2, global_batch_size=4, save=save, save_hf=True, **{"train_iters": 3, **flags}
    )


def exported(run: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in (run / "hf").glob("*.safetensors") for name, value in load_file(file).items()}


def assert_equal_files(found: Path, expected: Path) -> None:
    tensors, wanted = exported(found), exported(expected)
    assert tensors.keys() == wanted.keys() and tensors
    for name, value in tensors.items():
        assert value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]), name


def test_frozen_weights_take_half_the_bytes(ranks2: RankPool, tmp_path: Path) -> None:
    """In blocks that are partly trained, too; losses, checkpoints and exports stay as they are."""
    hf_dir = directory_of(tmp_path / "hf", torch.bfloat16)
    narrow = ranks2.run(bytes_of_run, words_of(tmp_path, hf_dir, tmp_path / "narrow"), timeout=120)
    wide = ranks2.run(bytes_of_run, words_of(tmp_path, hf_dir, tmp_path / "wide"), False, timeout=120)
    for (found, noticed), (before, _) in zip(narrow, wide, strict=True):
        assert noticed == []
        assert found["trained"] == before["trained"]
        assert found.keys() == {"trained", "torch.bfloat16"} and before.keys() == {"trained", "torch.float32"}
        assert 2 * found["torch.bfloat16"] == before["torch.float32"] > 100_000
    assert metrics_of(tmp_path / "narrow") == metrics_of(tmp_path / "wide")
    assert_equal_files(tmp_path / "narrow", tmp_path / "wide")
    source = load_file(hf_dir / "model.safetensors")
    frozen = [name for name in source if "visual." in name or "up_proj" in name]
    found = exported(tmp_path / "narrow")
    assert frozen and all(torch.equal(found[name], source[name]) for name in frozen)


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "parameters on the host": ({"offload_to_cpu": True}, {}),
    "replicated": ({"sharding_size": 1}, {}),
    "gathered once": ({"reshard_after_forward": False}, {}),
    "one unit, float16": ({"sub_modules_to_wrap": [], "param_dtype": "fp16"}, {"loss_scale": 64.0}),
    "tower whole on every rank": ({"ignored_modules": ["model.visual"]}, {}),
    "tensor parallelism": ({}, {"tensor_model_parallel_size": 2}),
    "built on meta, recomputed": ({"recompute_modules": WRAP}, {"init_model_with_meta_device": True}),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, ranks2: RankPool, tmp_path: Path) -> None:
    fsdp2, flags = LAYOUTS[layout]
    half = torch.float16 if "float16" in layout else torch.bfloat16
    hf_dir = directory_of(tmp_path / "hf", half)
    for name, narrows in (("narrow", True), ("wide", False)):
        words = words_of(tmp_path, hf_dir, tmp_path / name, fsdp2, **flags)
        for found, _ in ranks2.run(bytes_of_run, words, narrows, timeout=120):
            assert str(half if narrows else torch.float32) in found
    assert metrics_of(tmp_path / "narrow") == metrics_of(tmp_path / "wide")
    assert_equal_files(tmp_path / "narrow", tmp_path / "wide")


def wan_run(folder: str, source: str, narrows: bool) -> tuple[list[float], dict[str, torch.dtype], dict[str, Any]]:
    """Losses of a Wan transformer whose first block and embeddings are frozen, dtypes of its weights, and values."""
    from mindspeed_mm.backends.fsdp2 import FSDP2Backend

    class Frozen(Generator):
        def __init__(self, **how: Any) -> None:
            super().__init__(**how)
            for part in (self.predictor.blocks[0], self.predictor.condition_embedder):
                part.requires_grad_(False)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(trained_wan, "Generator", Frozen))
        if not narrows:
            stack.enter_context(mock.patch.object(FSDP2Backend, "_frozen_dtype", lambda self: None))
        run = trained_wan.TrainedWan(folder, model={"source": source}, bf16=True)
        losses = [run.step() for _ in range(2)]
    dtypes = {name: param.dtype for name, param in run.backend._root.named_parameters()}
    return losses, dtypes, {name: value.float() for name, value in run.whole().items()}


def test_a_generator_s_frozen_blocks(ranks2: RankPool, tmp_path: Path) -> None:
    """But for what diffusers keeps in float32: embeddings of timesteps, and modulation tables."""
    source = str(write_wan_dir(tmp_path / "wan"))
    store_in(tmp_path / "wan" / "diffusion_pytorch_model.safetensors", torch.bfloat16)
    found = ranks2.run(wan_run, str(tmp_path / "narrow"), source, True)
    expected = ranks2.run(wan_run, str(tmp_path / "wide"), source, False)
    for (losses, dtypes, values), (before, wide, whole) in zip(found, expected, strict=True):
        assert losses == before and set(wide.values()) == {torch.float32}
        assert {dtypes[name] for name in dtypes if "time_embedder" in name or "scale_shift" in name} == {torch.float32}
        assert dtypes["blocks.0.attn1.to_q.weight"] == torch.bfloat16 == dtypes["blocks.0.ffn.net.2.weight"]
        assert dtypes["blocks.1.attn1.to_q.weight"] == torch.float32
        assert values.keys() == whole.keys() and all(torch.equal(values[name], whole[name]) for name in values)


def test_resumed_runs_go_on_whatever_the_checkpoint_holds(ranks2: RankPool, tmp_path: Path) -> None:
    """A checkpoint of float32 frozen weights keeps them so, because they may have been trained before."""
    hf_dir = directory_of(tmp_path / "hf", torch.bfloat16)
    ranks2.run(bytes_of_run, words_of(tmp_path, hf_dir, tmp_path / "whole", train_iters=4), timeout=120)
    for narrows in (True, False):
        run = tmp_path / f"parts {narrows}"
        first = words_of(tmp_path, hf_dir, run, train_iters=4, exit_interval=2)
        ranks2.run(bytes_of_run, first, narrows, timeout=120)
        second = words_of(tmp_path, hf_dir, run, train_iters=4, load=run)
        dtype = "torch.bfloat16" if narrows else "torch.float32"
        for found, _ in ranks2.run(bytes_of_run, second, timeout=120):
            assert found.keys() == {"trained", dtype}
        assert metrics_of(run) == metrics_of(tmp_path / "whole")
        assert_equal_files(run, tmp_path / "whole")


def test_files_in_float32_keep_what_they_hold(ranks2: RankPool, tmp_path: Path) -> None:
    hf_dir = directory_of(tmp_path / "hf", torch.float32)
    run = tmp_path / "run"
    for found, noticed in ranks2.run(bytes_of_run, words_of(tmp_path, hf_dir, run, train_iters=1), timeout=120):
        assert found.keys() == {"trained", "torch.float32"}
        assert len(noticed) == 1 and "in float32, which bfloat16 would round: model.visual" in noticed[0]
    source, written = load_file(hf_dir / "model.safetensors"), exported(run)
    assert all(torch.equal(written[name], value) for name, value in source.items() if "visual." in name)
