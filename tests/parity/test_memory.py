"""Runs that save the memory of activations against the same runs without: losses and gradient norms, bit for bit.

The real entry scripts run in the workers: images through both backends, videos through FSDP2
(with inputs of blocks on the host also in `test_generation_layouts.py`).
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.accelerator.cpu import CPUAccelerator
from tests.parity.test_generation_layouts import Case as GenerationCase
from tests.parity.test_generation_layouts import files_of
from tests.support.launch import WRAP, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.tiny import tiny_qwen2_5_vl_dir, write_mixed_dataset

ROWS, STEPS = 8, 3
PARTS = ("vision_encoder", "vision_projector")
TRAINED = {"image_encoder": {part: {"freeze": False} for part in PARTS}}
TOWER = {"vision_encoder": {"freeze": False, "activation_offload": True}, "vision_projector": {"freeze": False}}
OFFLOADED = {"image_encoder": TOWER, "text_decoder": {"activation_offload": True}}
BLOCKS = ["predictor.blocks.{*}"]
SWAP: Mapping[str, Any] = {"swap_attention": True}
CHUNKS: Mapping[str, Any] = {"chunk_mlp_tokens": 16}
PP2 = {"pipeline_model_parallel_size": 2}
CP2, RING = {"context_parallel_size": 2}, {"context_parallel_algo": "megatron_cp_algo"}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
MEGATRON = {"use_torch_fsdp2": False, "fsdp2_config_path": None, "ckpt_format": None}


@dataclass(frozen=True)
class Saved:
    """A launch, and what saves memory in it.

    Attributes:
        kind: "images" with FSDP2, "megatron" or "videos".
        flags, fsdp2, model: what saves memory; `model` are keys of model.json.
        layout: flags of both runs.
        base: keys of fsdp2.yaml of both runs.
    """

    kind: str
    world: int
    flags: Mapping[str, Any] = field(default_factory=dict)
    fsdp2: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> Saved:
        """The same launch without."""
        return replace(self, flags={}, fsdp2={}, model={})


SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full"}
KEEP: dict[str, Any] = {"recompute_modules": WRAP, "recompute_keep": ["linear", "attention"]}
ALL = {"activation_offload_modules": WRAP}
CASES = {
    "images, 2 processes, attention and tower": Saved("images", 2, SWAP, {"activation_offload_modules": [WRAP[0]]}),
    "Megatron PP2, attention": Saved("megatron", 2, SWAP, layout=PP2),
}
#: MLPs on parts of the tokens: products of other sizes, and sums over tokens in another order
ROUNDED = {
    "images, MLPs on parts": Saved("images", 2, CHUNKS),
    "images, recomputed, MLPs on parts": Saved("images", 1, {**CHUNKS, **FULL}),
    "images, TP2 SP, MLPs on parts": Saved(
        "images", 2, CHUNKS, layout={"tensor_model_parallel_size": 2, "sequence_parallel": True}
    ),
    "Megatron TP2 SP, MLPs on parts": Saved(
        "megatron", 2, CHUNKS, layout={"tensor_model_parallel_size": 2, "sequence_parallel": True}
    ),
    "Megatron PP2, MLPs on parts": Saved("megatron", 2, CHUNKS, layout=PP2),
    "videos, MLPs on parts": Saved("videos", 2, {"chunk_mlp_tokens": 3}),
}
FURTHER = {
    "images, 1 process": Saved("images", 1, fsdp2=ALL),
    "images, bf16": Saved("images", 2, fsdp2=ALL, layout={"bf16": True}),
    "images, parameters kept": Saved("images", 2, fsdp2=ALL, base={"reshard_after_forward": False}),
    "images, parameters in host memory": Saved("images", 2, fsdp2=ALL, base={"offload_to_cpu": True}),
    "images, TP2": Saved("images", 2, SWAP, ALL, layout={"tensor_model_parallel_size": 2}),
    "images, CP2": Saved("images", 2, SWAP, layout=CP2),
    "images, compiled": Saved("images", 1, fsdp2=ALL, base={"compile": True, "compile_backend": "aot_eager"}),
    "images, attention beside recomputed towers": Saved(
        "images", 2, SWAP, base={"recompute_modules": [WRAP[0]], "use_reentrant": False}
    ),
    "Megatron, 1 process": Saved("megatron", 1, SWAP),
    "Megatron TP2 SP": Saved("megatron", 2, SWAP, layout={"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "Megatron PP2, layers": Saved("megatron", 2, layout=PP2, model=OFFLOADED),
    "Megatron, layers of the tower, attention": Saved("megatron", 1, SWAP, model={"image_encoder": TOWER}),
    "Megatron PP2 VPP2": Saved("megatron", 2, SWAP, layout=VPP2),
    "Megatron, core of attention recomputed": Saved("megatron", 1, SWAP, layout={"recompute_activations": True}),
    "Megatron PP2, core of attention and MLP recomputed": Saved(
        "megatron", 2, {**SELECTIVE, "recompute_modules": ["core_attn", "mlp"]}, layout=PP2
    ),
    "images, core of attention recomputed": Saved("images", 2, SELECTIVE),
    "images, MLP, norms and attention recomputed": Saved(
        "images", 2, {**SELECTIVE, "recompute_modules": ["mlp", "layernorm", "core_attn"]}
    ),
    "images, TP2 SP, recompute but of products and attention": Saved(
        "images", 2, fsdp2=KEEP, layout={"tensor_model_parallel_size": 2, "sequence_parallel": True}
    ),
    "images, CP2 ring, recompute but of products": Saved(
        "images", 2, fsdp2={**KEEP, "recompute_keep": ["linear"]}, layout={**CP2, **RING}
    ),
    "images, CP2 Ulysses, recompute but of products and attention": Saved("images", 2, fsdp2=KEEP, layout=CP2),
    "images, recompute but of attention in some blocks": Saved(
        "images", 1, {**FULL, "recompute_num_layers_skip_core_attention": 1}
    ),
    "videos, blocks": Saved("videos", 2, fsdp2={"activation_offload_modules": BLOCKS}),
    "videos, attention": Saved("videos", 1, SWAP),
    "videos, recompute but of products and attention": Saved("videos", 2, fsdp2={**KEEP, "recompute_modules": BLOCKS}),
    "videos, core of attention recomputed": Saved("videos", 1, SELECTIVE),
}


@functools.cache
def rows_with_images() -> tuple[Path, Path]:
    folder = Path(tempfile.mkdtemp(prefix="memory-"))
    hf_dir = tiny_qwen2_5_vl_dir(folder / "hf", seed=3, tie=False, deep=True)
    return hf_dir, write_mixed_dataset(folder / "data", rows=ROWS, seed=5)


def run_counting_copies(words: list[str], script: str) -> int:
    """Number of copies beside the device's queue, to the host and back, in a launch."""
    copies, copy_beside = 0, CPUAccelerator.copy_beside

    def counted(device: CPUAccelerator, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        nonlocal copies
        copies += 1
        return copy_beside(device, target, source)

    with mock.patch.object(CPUAccelerator, "copy_beside", counted):
        run_entry(words, script)
    return copies


def run(case: Saved, pools: Any, folder: Path) -> Any:
    """Losses and gradient norms of a launch, and whether each rank has copied activations."""
    settings = {"micro_batch_size": 1, "global_batch_size": ROWS, "train_iters": STEPS, "save": folder / "run"}
    settings |= {"no_save_optim": True, **case.layout, **case.flags}
    fsdp2 = {"sub_modules_to_wrap": BLOCKS if case.kind == "videos" else WRAP, **case.base, **case.fsdp2}
    if case.kind == "videos":
        files = files_of(GenerationCase(fsdp2=fsdp2), folder / "files")
        copies = pools[case.world].run(
            run_counting_copies, launch_flags(files, **settings), "pretrain_sora.py", timeout=120
        )
        return *metrics_of(folder / "run"), [number > 0 for number in copies]
    model: dict[str, Any] = {"loss_cfg": {"loss_type": "per_token_loss"}, **TRAINED}
    if case.kind == "megatron":
        model |= {"model_id": "qwen2_5_vl", **case.model}
        settings = {**MEGATRON, "seq_length": 256, **settings}
    files = write_run_files(folder / "files", *rows_with_images(), model=model, fsdp2=fsdp2)
    script = "pretrain_vlm.py" if case.kind == "megatron" else "pretrain_transformers.py"
    copies = pools[case.world].run(run_counting_copies, launch_flags(files, **settings), script, timeout=120)
    return *metrics_of(folder / "run"), [number > 0 for number in copies]


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in FURTHER)])
def test_no_bit_changes(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    case = {**CASES, **FURTHER}[name]
    pools = request.getfixturevalue("megatron_pools" if case.kind == "megatron" else "pools")
    *plain, without = run(case.plain, pools, tmp_path / "plain")
    losses, norms, copied = run(case, pools, tmp_path / "saved")
    assert len(losses) == STEPS and [losses, norms] == plain
    offloads = "swap_attention" in case.flags or "activation_offload_modules" in case.fsdp2 or bool(case.model)
    assert without == [False] * case.world and copied == [offloads] * case.world


@pytest.mark.full
@pytest.mark.parametrize("name", ROUNDED)
def test_what_rounding_changes(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    case = ROUNDED[name]
    pools = request.getfixturevalue("megatron_pools" if case.kind == "megatron" else "pools")
    *plain, _ = run(case.plain, pools, tmp_path / "plain")
    *found, _ = run(case, pools, tmp_path / "saved")
    assert found != plain, "nothing has run in parts"
    for values, expected in zip(found, plain, strict=True):
        assert values == pytest.approx(expected, rel=1e-5)
