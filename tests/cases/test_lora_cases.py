"""Cases of the kind LoRA, and those of other kinds whose run trains adapters.

The real entry script runs on flags and files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.utils.log import logger
from tests.support.families import families
from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.reference import load_plain
from tests.support.tiny import write_mixed_dataset
from tests.support.tiny_text import text_dir
from tests.support.workers import RankError, RankPool

ROWS = 4


@pytest.fixture(scope="module")
def alone() -> Iterator[RankPool]:
    """One worker."""
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def text_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_dataset(tmp_path_factory.mktemp("text"), rows=ROWS, seed=5, images=False)


@pytest.fixture(scope="module")
def image_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_dataset(tmp_path_factory.mktemp("images"), rows=ROWS, seed=5)


def run(
    pool: RankPool,
    folder: Path,
    hf_dir: Path,
    data: Path,
    *,
    model: Any = None,
    fsdp2: Any = None,
    function: Any = run_entry,
    **flags: Any,
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a launch in which every step sees all rows; its run folder is `folder`/run.

    Args:
        function: called with the launch's words on every rank.
    """
    wrap = WRAP_TEXT if "vision_config" not in (hf_dir / "config.json").read_text() else WRAP
    files = write_run_files(folder, hf_dir, data, model=model, fsdp2={"sub_modules_to_wrap": wrap, **(fsdp2 or {})})
    settings = {"micro_batch_size": 1, "global_batch_size": ROWS, "train_iters": 1, "save": folder / "run"}
    settings |= {"lora_target_modules": "q_proj,v_proj", "lora_r": 4, "lora_alpha": 8, **flags}
    pool.run(function, launch_flags(files, **settings), timeout=60)
    return metrics_of(folder / "run")


def adapters_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the PEFT directory of a run with --save-hf."""
    return load_file(folder / "run/hf/adapter_model.safetensors")


def layers_of(folder: Path) -> set[str]:
    """The layers that have adapters in it; layers that differ in their number only are listed once."""
    names = {re.sub(r"\.lora_.*", "", name.removeprefix("base_model.model.")) for name in adapters_of(folder)}
    return {re.sub(r"\.\d+\.", ".N.", name) for name in names}


def test_r01_adapters_in_a_tower_whose_input_needs_no_gradient(
    ranks2: RankPool, qwen2_5_vl_dir: Path, image_rows: Path, tmp_path: Path
) -> None:
    """R01: reentrant recompute of the tower's blocks: gradients are there, and equal to recompute off."""
    settings: dict[str, Any] = {"lora_target_modules": "qkv", "lora_init": "random", "train_iters": 2, "lr": 1e-2}
    off = run(ranks2, tmp_path / "off", qwen2_5_vl_dir, image_rows, **settings)
    recompute = {"recompute_modules": WRAP, "use_reentrant": True}
    on = run(ranks2, tmp_path / "on", qwen2_5_vl_dir, image_rows, fsdp2=recompute, save_hf=True, **settings)
    assert on[0] == pytest.approx(off[0], rel=1e-6)
    assert on[1] == pytest.approx(off[1], rel=1e-5)
    assert min(on[1]) > 1e-4
    assert layers_of(tmp_path / "on") == {"model.visual.blocks.N.attn.qkv"}


def numbers_of_parameters(words: list[str]) -> dict[str, int]:
    """Run the script; numbers of values of this rank's parameters, and of the whole ones."""
    from unittest import mock

    from torch.distributed.tensor import DTensor

    from mindspeed_mm.backends.fsdp2 import FSDP2Backend

    found: dict[str, int] = {}
    build = FSDP2Backend.build_optimizer

    def count(self: Any, model: Any, run: Any) -> Any:
        for name, param in self._root.named_parameters():
            kind = "adapters" if "lora_" in name else "experts" if ".experts." in name else "rest"
            kind += " trained" if param.requires_grad else " frozen"
            local = param.to_local() if isinstance(param, DTensor) else param
            found[kind] = found.get(kind, 0) + param.numel()
            found[f"{kind} here"] = found.get(f"{kind} here", 0) + local.numel()
        return build(self, model, run)

    with mock.patch.object(FSDP2Backend, "build_optimizer", count):
        run_entry(words)
    return found


def test_e03_experts_stay_frozen_under_expert_parallelism(ranks2: RankPool, text_rows: Path, tmp_path: Path) -> None:
    """E03: adapters of attention only, EP 2: as many trained parameters as with EP 1, no memory for others."""
    hf_dir = families()["qwen3_moe"].make(tmp_path / "hf")

    def numbers(name: str, **flags: Any) -> list[dict[str, int]]:
        files = write_run_files(tmp_path / name, hf_dir, text_rows, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
        settings = {"micro_batch_size": 1, "global_batch_size": ROWS, "train_iters": 1, "save": None, **flags}
        return ranks2.run(
            numbers_of_parameters, launch_flags(files, **settings, lora_target_modules="q_proj,v_proj"), timeout=60
        )

    one, split = numbers("ep1"), numbers("ep2", expert_model_parallel_size=2)
    assert one[0].keys() == split[0].keys() and "experts trained" not in one[0] and "rest trained" not in one[0]
    for before, after in zip(one, split, strict=True):
        assert after["adapters trained"] == before["adapters trained"] > 0
        assert after["adapters trained here"] == before["adapters trained here"]
        assert after["experts frozen here"] == after["experts frozen"] // 2


def test_k04_resume_from_a_checkpoint_and_from_the_export(
    ranks2: RankPool, qwen3_dir: Path, text_rows: Path, tmp_path: Path
) -> None:
    """K04: the loss of the next step equals that of an unbroken run, and PEFT finds every key of the export."""
    unbroken = run(ranks2, tmp_path / "unbroken", qwen3_dir, text_rows, train_iters=3, lr=1e-2)
    half = {"save_hf": True, "train_iters": 2, "lr": 1e-2}
    assert run(ranks2, tmp_path / "half", qwen3_dir, text_rows, **half)[0] == unbroken[0][:2]
    saved = tmp_path / "half/run"
    peft = run(ranks2, tmp_path / "peft", qwen3_dir, text_rows, lora_load=saved / "hf")
    assert peft[0] == pytest.approx(unbroken[0][2:], rel=1e-6)
    resumed = run(ranks2, tmp_path / "half", qwen3_dir, text_rows, train_iters=3, lr=1e-2, load=saved)
    assert resumed[0] == pytest.approx(unbroken[0], rel=1e-6)
    assert resumed[1] == pytest.approx(unbroken[1], rel=1e-5)

    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict

    model = PeftModel.from_pretrained(load_plain(qwen3_dir), saved / "hf")
    assert get_peft_model_state_dict(model).keys() == adapters_of(tmp_path / "half").keys()


def run_heard(words: list[str]) -> None:
    """Run the script; what it logs about LoRA is in heard.txt beside the run folder."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        run_entry(words)
    finally:
        logger.removeHandler(handler)
    heard = Path(words[words.index("--save") + 1]).parent / "heard.txt"
    heard.write_text("\n".join(line for line in lines if "LoRA" in line))


def test_o01_names_do_not_reach_a_frozen_tower(
    alone: RankPool, qwen2_5_vl_dir: Path, image_rows: Path, tmp_path: Path
) -> None:
    """O01: the tower has layers of the same name and is frozen: it gets no adapters, and what gets some is listed."""
    frozen = {"image_encoder": {"vision_encoder": {"freeze": True}, "vision_projector": {"freeze": True}}}
    settings: dict[str, Any] = {"lora_target_modules": "q_proj,down_proj", "save_hf": True}
    run(alone, tmp_path / "frozen", qwen2_5_vl_dir, image_rows, model=frozen, function=run_heard, **settings)
    layers = "model.language_model.layers.N"
    assert layers_of(tmp_path / "frozen") == {f"{layers}.self_attn.q_proj", f"{layers}.mlp.down_proj"}
    listed = layers.replace("N", "{*}")
    heard = (tmp_path / "frozen/heard.txt").read_text()
    assert f"adapters are at {listed}.self_attn.q_proj (2), {listed}.mlp.down_proj (2)" in heard
    run(alone, tmp_path / "trained", qwen2_5_vl_dir, image_rows, **settings)
    assert "model.visual.blocks.N.mlp.down_proj" in layers_of(tmp_path / "trained")


def test_o03_a_shared_experts_layer_is_not_the_routed_experts(alone: RankPool, text_rows: Path, tmp_path: Path) -> None:
    """O03: only the named layer has adapters; the routed experts' stacked weights have none."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    sizes |= {"shared_expert_intermediate_size": 32, "tie_word_embeddings": False}
    hf_dir = text_dir(tmp_path / "hf", Qwen2MoeForCausalLM, Qwen2MoeConfig, sizes)
    run(alone, tmp_path / "a", hf_dir, text_rows, lora_target_modules="mlp.shared_expert.up_proj", save_hf=True)
    assert layers_of(tmp_path / "a") == {"model.layers.N.mlp.shared_expert.up_proj"}
    with pytest.raises(RankError, match=r"--lora-target-modules mlp.experts.up_proj: no layer .* single parameters"):
        run(alone, tmp_path / "b", hf_dir, text_rows, lora_target_modules="mlp.experts.up_proj")


@pytest.mark.parametrize("init", ["kaiming", pytest.param("gaussian", marks=pytest.mark.full)])
def test_o04_first_values_on_meta(
    init: str, ranks2: RankPool, qwen3_dir: Path, text_rows: Path, tmp_path: Path
) -> None:
    """O04: B is zero and A random, so that the first loss is the base model's; an unknown init is refused."""
    settings: dict[str, Any] = {"init_model_with_meta_device": True, "lr": 0.0}
    found = run(ranks2, tmp_path / "lora", qwen3_dir, text_rows, lora_init=init, save_hf=True, **settings)
    base = run(ranks2, tmp_path / "base", qwen3_dir, text_rows, lora_target_modules=None, lora_r=None, lora_alpha=None)
    assert found[0] == pytest.approx(base[0], rel=1e-6)
    adapters = adapters_of(tmp_path / "lora")
    for name, tensor in adapters.items():
        bound = 1 / tensor.shape[1] ** 0.5  # of kaiming uniform
        expected = {"kaiming": bound / 3**0.5, "gaussian": 1 / 4}[init] if "lora_A" in name else 0.0
        assert float(tensor.std()) == pytest.approx(expected, rel=0.2)
    first, second = (adapters[f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight"] for i in range(2))
    assert not torch.equal(first, second)
    with pytest.raises(RankError, match="--lora-init"):
        run(ranks2, tmp_path / "unknown", qwen3_dir, text_rows, lora_init="pizza")


@pytest.mark.full
def test_f02_text_only_rows_leave_the_adapters_of_a_tower_alone(
    ranks2: RankPool, qwen2_5_vl_dir: Path, text_rows: Path, tmp_path: Path
) -> None:
    """F02: adapters of a tower that no row of a global batch feeds keep their values, without decay."""
    settings: dict[str, Any] = {"lora_target_modules": "qkv,q_proj", "lora_init": "random", "save_hf": True}
    run(ranks2, tmp_path / "still", qwen2_5_vl_dir, text_rows, lr=0.0, **settings)
    run(ranks2, tmp_path / "moved", qwen2_5_vl_dir, text_rows, lr=1e-2, weight_decay=1.0, train_iters=2, **settings)
    before, after = adapters_of(tmp_path / "still"), adapters_of(tmp_path / "moved")
    tower = {name for name in before if "visual" in name}
    assert tower and all(torch.equal(before[name], after[name]) for name in tower)
    assert not any(torch.equal(before[name], after[name]) for name in before.keys() - tower)


def test_n03_one_process_is_no_special_case_with_adapters(
    ranks2: RankPool, alone: RankPool, qwen2_5_vl_dir: Path, image_rows: Path, tmp_path: Path
) -> None:
    """N03: the same fsdp2.yaml on one process and on two, adapters in it: the same dtypes, so the same bf16 losses."""
    bf16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    settings: dict[str, Any] = {"train_iters": 2, "lora_init": "random", "lr": 1e-2}
    one = run(alone, tmp_path / "one", qwen2_5_vl_dir, image_rows, fsdp2=bf16, **settings)
    two = run(ranks2, tmp_path / "two", qwen2_5_vl_dir, image_rows, fsdp2=bf16, **settings)
    assert one[0][0] == pytest.approx(two[0][0], rel=1e-6)  # a row is a micro-batch on either: the same sums
    assert one[1][0] == pytest.approx(two[1][0], rel=1e-4)
    assert one[0][1] == pytest.approx(two[0][1], rel=1e-4)
    full = run(alone, tmp_path / "full", qwen2_5_vl_dir, image_rows, **settings)
    assert full[1][0] != pytest.approx(one[1][0], rel=3e-4)
