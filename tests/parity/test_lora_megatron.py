"""LoRA on the Megatron backend against a peft + transformers loop: losses, gradient norms and trained adapters, fp32.

The suite runs a case of each kind, and `-m full` the whole table.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.support.gradients import run_for_megatron_gradients, worst_difference
from tests.support.launch import launch_flags, metrics_of, run_entry, write_run_files
from tests.support.packs import ROWS as PACKS
from tests.support.packs import make_samples, packed_batches, run_on_batches
from tests.support.reference import load_plain, rows_as_inputs, train_plainly, train_reference
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir, write_mixed_dataset

ROWS = 8
STEPS = 3
SEED_OF_DROPOUT = 7
LOSS_TOLERANCE = 1e-6
NORM_TOLERANCE = GRADIENT_TOLERANCE = WEIGHT_TOLERANCE = 1e-5
TEXT_TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SP = {"sequence_parallel": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAP = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}


@dataclass(frozen=True)
class Case:
    """A layout, and what has adapters."""

    world: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    micro: int = 2
    kind: str = "text"
    targets: tuple[str, ...] = TEXT_TARGETS
    peft: tuple[tuple[str, Any], ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    full: bool = False


VL_TARGETS = ("q_proj", "v_proj", "gate_proj", "down_proj", "attn.qkv", "attn.proj", "merger.mlp.0")
WHOLE_TOWER = {"image_encoder": {"vision_encoder": {"freeze": False}, "vision_projector": {"freeze": False}}}
VL = {"kind": "vl", "targets": VL_TARGETS, "model": WHOLE_TOWER}
CASES = {
    "1 process": Case(),
    "TP2": Case(2, TP2),
    "TP2 SP": Case(2, {**TP2, **SP}),
    "PP2, accumulation": Case(2, PP2, micro=1),
    "recompute": Case(1, RECOMPUTE),
    "DP2 distributed optimizer, overlap": Case(2, OVERLAP),
    "PP2 VPP2": Case(2, {**PP2, "virtual_pipeline_model_parallel_size": 2}, full=True),
    "TP2 SP PP2, recompute": Case(4, {**TP2, **SP, **PP2, **RECOMPUTE}),
    "TP2 DP2 distributed optimizer": Case(4, {**TP2, **DISTRIBUTED}, full=True),
    "rsLoRA": Case(1, {"lora_use_rslora": True}, peft=(("use_rslora", True),), full=True),
    "TP2, DoRA": Case(2, {**TP2, "lora_use_dora": True}, peft=(("use_dora", True),)),
    "TP2 SP, DoRA": Case(2, {**TP2, **SP, "lora_use_dora": True}, peft=(("use_dora", True),), full=True),
    "TP2, all layers by Megatron's names": Case(
        2, {**TP2, "lora_target_modules": "linear_qkv,linear_proj,linear_fc1,linear_fc2"}, targets=ALL_TARGETS
    ),
    "PP2, head trained whole": Case(
        2, {**PP2, "lora_modules_to_save": "lm_head"}, peft=(("modules_to_save", ("lm_head",)),), full=True
    ),
    "TP2 SP, embedding trained whole": Case(
        2, {**TP2, **SP, "lora_modules_to_save": "embed_tokens"}, peft=(("modules_to_save", ("embed_tokens",)),)
    ),
    "PP2, tied embedding trained whole": Case(
        2,
        {**PP2, "lora_modules_to_save": "lm_head"},
        kind="tied",
        peft=(("modules_to_save", ("embed_tokens",)), ("ensure_weight_tying", True)),
    ),
    "one layer": Case(2, TP2, targets=("model.layers.{0}.self_attn.k_proj",), full=True),
    "vision-language": Case(**VL),
    "vision-language, TP2 SP, recompute": Case(2, {**TP2, **SP, **RECOMPUTE}, **VL),
    "vision-language, tower trained whole": Case(
        2,
        {**TP2, "lora_apply_modules": "text_decoder", "lora_mixed_training": True},
        kind="vl",
        targets=("q_proj", "model.language_model.layers.{0}.mlp.down_proj"),
        peft=(("modules_to_save", ("visual",)),),
        model=WHOLE_TOWER,
        full=True,
    ),
    "vision-language, PP2": Case(2, PP2, **VL, full=True),
    "vision-language, DoRA": Case(1, {"lora_use_dora": True}, peft=(("use_dora", True),), **VL, full=True),
}


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="lora-megatron-"))


@functools.cache
def model_and_data(kind: str) -> tuple[Path, Path]:
    folder = workspace() / kind
    make = tiny_qwen2_5_vl_dir if kind == "vl" else tiny_qwen3_dir
    hf_dir = make(folder / "hf", seed=3, tie=kind == "tied", deep=True)
    return hf_dir, write_mixed_dataset(folder / "data", rows=ROWS, seed=5, images=kind == "vl")


@dataclass(frozen=True)
class Reference:
    """What a peft + transformers loop has seen.

    Attributes:
        start: directory of the adapters that training starts from.
        losses, norms: of the steps.
        gradients: of the first step, clipped, by names in files.
        adapters: after the last step, by names in files.
    """

    start: Path
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    adapters: dict[str, torch.Tensor]


@functools.cache
def reference(kind: str, targets: tuple[str, ...], settings: tuple[tuple[str, Any], ...]) -> Reference:
    hf_dir, data = model_and_data(kind)
    return reference_of(hf_dir, rows_as_inputs(hf_dir, data), targets, settings)


def reference_of(
    hf_dir: Path,
    inputs: list[dict[str, torch.Tensor]],
    targets: tuple[str, ...] = TEXT_TARGETS,
    settings: tuple[tuple[str, Any], ...] = (),
    steps: int = STEPS,
) -> Reference:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(11)
    # PEFT's own random B: with B zero, the first step has no gradient for A
    plain = [target.replace("{0}", "0") for target in targets]
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in settings}
    config = LoraConfig(r=4, lora_alpha=8, target_modules=plain, init_lora_weights=False, **lists)
    model = get_peft_model(load_plain(hf_dir), config)
    start = Path(tempfile.mkdtemp(dir=workspace()))
    model.save_pretrained(start)
    torch.manual_seed(SEED_OF_DROPOUT)
    first = train_plainly(hf_dir, inputs, 1, lr=0, clip=1.0, model=model)
    torch.manual_seed(SEED_OF_DROPOUT)
    losses, norms, _ = train_reference(hf_dir, inputs, steps, model=model)
    return Reference(start, losses, norms, in_files(first.gradients), in_files(get_peft_model_state_dict(model)))


def in_files(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names without PEFT's prefix and the name of its adapter."""
    short = {name.removeprefix("base_model.model."): value for name, value in tensors.items()}
    for part in (".default", ".modules_to_save", ".base_layer"):
        short = {name.replace(part, ""): value for name, value in short.items()}
    return {name.replace("magnitude_vector.weight", "magnitude_vector"): value for name, value in short.items()}


def launch_words(
    kind: str, folder: Path, hf_dir: Path, data: Path, model: dict[str, Any] | None = None, **flags: Any
) -> list[str]:
    model_id, loss = "qwen2_5_vl" if kind == "vl" else "qwen3", {"loss_cfg": {"loss_type": "per_token_loss"}}
    files = write_run_files(folder, hf_dir, data, model={"model_id": model_id, **loss, **(model or {})})
    settings: dict[str, Any] = {"use_torch_fsdp2": False, "fsdp2_config_path": None, "ckpt_format": None}
    settings |= {"seq_length": 256, "save": folder / "run", "save_hf": True, "lora_r": 4, "lora_alpha": 8, **flags}
    return launch_flags(files, **settings)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] if c.full else []) for n, c in CASES.items()]
)
def test_equals_peft(name: str, megatron_pools: dict[int, Any], tmp_path: Path) -> None:
    case = CASES[name]
    expected = reference(case.kind, case.targets, case.peft)
    hf_dir, data = model_and_data(case.kind)
    settings = {"micro_batch_size": case.micro, "global_batch_size": ROWS, "train_iters": STEPS, **case.flags}
    settings = {"lora_target_modules": ",".join(case.targets), "lora_load": expected.start, **settings}
    flags = launch_words(case.kind, tmp_path, hf_dir, data, case.model, **settings)
    pool = megatron_pools[case.world]
    if "use_distributed_optimizer" in case.flags:
        pool.run(run_entry, flags, "pretrain_vlm.py", timeout=120)
    else:
        gradients = pool.run(run_for_megatron_gradients, flags, "pretrain_vlm.py", timeout=120)[0][0]
        worst = worst_difference(gradients, expected.gradients)
        assert worst[0] < GRADIENT_TOLERANCE, worst
    losses, norms = metrics_of(tmp_path / "run")
    assert losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
    assert norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)
    written = in_files(load_file(tmp_path / "run/hf/adapter_model.safetensors"))
    worst = worst_difference(written, expected.adapters)
    assert worst[0] < WEIGHT_TOLERANCE, worst


def run_with_seed(words: list[str], script: str) -> None:
    """Run an entry script whose adapters' random state is that of SEED_OF_DROPOUT when its only step begins."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from mindspeed_mm.backends.ptd import PTDBackend
    from mindspeed_mm.models.megatron.adapters import DROPOUT_STATE

    train = PTDBackend.forward_backward

    def seeded(self: PTDBackend, *args: Any) -> None:
        tracker = get_cuda_rng_tracker()
        states = {k: v for k, v in tracker.get_states().items() if k != DROPOUT_STATE}
        tracker.set_states(states)
        tracker.seeds_.discard(SEED_OF_DROPOUT)
        tracker.add(DROPOUT_STATE, SEED_OF_DROPOUT)
        train(self, *args)

    with mock.patch.object(PTDBackend, "forward_backward", seeded):
        run_entry(words, script)


@pytest.mark.parametrize("use_dora", [False, pytest.param(True, marks=pytest.mark.full)], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(1, {}), pytest.param(1, RECOMPUTE, marks=pytest.mark.full), (2, TP2), (2, {**TP2, **SP})],
    ids=["1 process", "recompute", "TP2", "TP2 SP"],
)
def test_dropout_draws_the_masks_of_peft(
    ranks: int, flags: dict[str, Any], use_dora: bool, megatron_pools: dict[int, Any], tmp_path: Path
) -> None:
    hf_dir, data = model_and_data("text")
    (tmp_path / "rows").mkdir()
    inputs = rows_as_inputs(hf_dir, data)
    # rows are shuffled: they are all the same one, of a length that two ranks divide
    number = next(i for i, row in enumerate(inputs) if row["input_ids"].shape[1] % 2 == 0)
    row = json.loads(data.read_text())[number]
    same = tmp_path / "rows" / data.name
    same.write_text(json.dumps([row] * ROWS))
    settings = (("lora_dropout", 0.4), ("use_dora", use_dora))
    expected = reference_of(hf_dir, [inputs[number]] * ROWS, settings=settings, steps=1)
    flags = {"lora_dropout": 0.4, "lora_use_dora": use_dora, "lora_load": expected.start, **flags}
    flags |= {"micro_batch_size": 1, "global_batch_size": ROWS, "train_iters": 1}
    words = launch_words("text", tmp_path, hf_dir, same, lora_target_modules=",".join(TEXT_TARGETS), **flags)
    megatron_pools[ranks].run(run_with_seed, words, "pretrain_vlm.py", timeout=120)
    losses, norms = metrics_of(tmp_path / "run")
    assert losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
    assert norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["text", "vl"])
def test_packed_rows(kind: str, megatron_pools: dict[int, Any], tmp_path: Path) -> None:
    hf_dir, data = model_and_data(kind)
    samples = make_samples(hf_dir)
    targets = VL_TARGETS if kind == "vl" else TEXT_TARGETS
    expected = reference_of(hf_dir, [samples[number] for row in PACKS for number in row], targets)
    flags = {"micro_batch_size": 2, "global_batch_size": len(PACKS), "train_iters": STEPS, "mm_data": None, **TP2, **SP}
    flags |= {"lora_target_modules": ",".join(targets), "lora_load": expected.start}
    words = launch_words(kind, tmp_path, hf_dir, data, WHOLE_TOWER if kind == "vl" else {}, **flags)
    megatron_pools[2].run(run_on_batches, words, "pretrain_vlm.py", packed_batches(samples), timeout=120)
    losses, norms = metrics_of(tmp_path / "run")
    assert losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
    assert norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)
