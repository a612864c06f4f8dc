"""Compiled blocks train what a hand-written transformers loop trains: losses, norms, gradients, weights, in fp32.

Most rows capture graphs and run them operator by operator, which takes little time; `inductor` has kernels of its own.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.accelerator.attention.jit_cpu import jit_attention
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.compiled import modules_to_compile
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.parallel.compile import apply_compile
from tests.support.compiled import compiled_by, counting, run_compiled
from tests.support.packs import make_samples, pack
from tests.support.parallel_case import Limits, ParallelCase, differences
from tests.support.parallel_models import LAYOUTS, MODELS

#: of losses: another order of sums in kernels
LIMITS = Limits(loss=1e-5)
WRAPPED = "wrapped modules"


@dataclass(frozen=True)
class Case:
    """A launch with compiled blocks.

    Attributes:
        model, layout, form: of the table of parallelisms.
        backend: of torch.compile.
        fsdp2, flags: what differs beside it.
        in_suite: whether the suite runs it.
    """

    model: str
    layout: str
    form: str
    backend: str = "aot_eager"
    fsdp2: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    in_suite: bool = False


RECOMPUTED = {"recompute_modules": WRAPPED, "use_reentrant": False}
REENTRANT = {"recompute_modules": WRAPPED, "use_reentrant": True}
OFFLOADED = {"activation_offload_modules": WRAPPED}
CHUNKED = {"chunk_mbs_modules": WRAPPED, "chunk_mbs_kwargs": ["position_embeddings"]}
CASES = [
    Case("qwen3", "FSDP2", "padded", "inductor", in_suite=True),
    Case("qwen3", "FSDP2", "packed", fsdp2=RECOMPUTED),
    Case("qwen3", "HSDP 2x2", "packed"),
    Case("qwen2_5_vl", "FSDP2", "packed", fsdp2=RECOMPUTED),
    Case("qwen2_5_vl", "1 process", "padded"),
    Case("qwen2_5_vl", "FSDP2", "padded", fsdp2=REENTRANT),
    Case("qwen3_vl", "1 process", "padded"),
    Case("qwen3_vl", "FSDP2", "packed"),
    Case("qwen3_vl", "HSDP 2x2", "padded", fsdp2=RECOMPUTED),
    Case("qwen3_moe", "FSDP2", "packed"),
    Case("gpt_oss", "FSDP2", "padded"),
    Case("deepseek_v3", "FSDP2", "padded"),
    Case("internvl", "FSDP2", "packed"),
    Case("qwen3_omni_moe", "1 process", "padded"),
    Case("glm4v_moe", "1 process", "padded"),
    Case("qwen3", "CP2 ring", "packed"),
    Case("qwen3", "CP2 Ulysses", "padded"),
    Case("qwen3", "TP2 SP", "packed"),
    Case("qwen3_moe", "EP2", "packed"),
    Case("qwen3_moe", "FSDP2", "packed", fsdp2=RECOMPUTED),
    Case("qwen3", "TP2", "packed"),
    Case("qwen3", "1 process", "padded", fsdp2=OFFLOADED),
    Case("qwen3", "FSDP2", "padded", fsdp2={**OFFLOADED, **RECOMPUTED}),
    Case("qwen3", "1 process", "padded", fsdp2={**CHUNKED, **RECOMPUTED}),
    Case("qwen2_5_vl", "FSDP2", "packed", fsdp2={**OFFLOADED, **REENTRANT}),
    Case("qwen3", "1 process", "padded", "inductor"),
    Case("qwen2_5_vl", "1 process", "packed", "inductor", RECOMPUTED),
    Case("qwen2_5_vl", "HSDP 2x2", "padded", "inductor"),
    Case("qwen3_vl", "FSDP2", "padded", "inductor"),
    Case("gpt_oss", "FSDP2", "packed", "inductor"),
    Case("qwen3", "CP2 ring", "packed", "inductor"),
    Case("deepseek_v3", "FSDP2", "padded", "inductor"),
]


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="compile-"))


@pytest.fixture(scope="session")
def cases(pools: dict[int, Any]) -> Any:
    """Model → its case."""
    return functools.cache(lambda name: ParallelCase(name, MODELS[name], workspace() / name, pools))


def name_of(case: Case) -> str:
    return ", ".join([case.model, case.layout, case.form, case.backend, *case.fsdp2, *case.flags])


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case.in_suite else [pytest.mark.full], id=name_of(case)) for case in CASES]
)
def test_equals_a_hand_written_loop(case: Case, cases: Any, tmp_path: Path) -> None:
    table = cases(case.model)
    wrap = list(table.model.family.wrap)
    fsdp2 = {key: wrap if value is WRAPPED else value for key, value in case.fsdp2.items()}
    fsdp2 |= {"compile": True, "compile_backend": case.backend}
    found = table.run(
        LAYOUTS[case.layout], case.form, tmp_path / "case", runner=run_compiled, fsdp2=fsdp2, **case.flags
    )
    assert differences(found, table.plain(case.form)).problems(LIMITS) == []
    for rank in compiled_by(tmp_path / "case" / "run"):
        assert rank.graphs > 0
        assert rank.has_jit_attention == (case.backend == "inductor" and jit_attention() is not None)


@pytest.mark.full
def test_ranks_share_the_kernels_of_earlier_runs(cases: Any, tmp_path: Path) -> None:
    for turn in ("first", "second"):
        keys = {"compile": True}
        cases("qwen3").run(LAYOUTS["FSDP2"], "packed", tmp_path / turn, runner=run_compiled, fsdp2=keys)
    ranks = compiled_by(tmp_path / "second" / "run")
    assert len(ranks) == 2 and all(rank.hits > 0 and rank.misses == 0 for rank in ranks)


STEPS = 20


def mixed_rows(samples: list[dict[str, Any]], step: int) -> dict[str, torch.Tensor]:
    """Packed rows, and padded ones: one and many, with media and without, each of another length."""
    drawn = random.Random(step)
    if step % 2:
        return pack([drawn.sample(samples, drawn.randint(1, 3)) for _ in range(drawn.choice([1, 2, 3]))])
    rows, longest = drawn.choice([1, 2, 5]), drawn.randint(9, 40)
    tokens = torch.randint(5, 60, (rows, longest), generator=torch.Generator().manual_seed(step))
    lengths = torch.tensor([longest, *(drawn.randint(5, longest) for _ in range(rows - 1))])
    mask = torch.arange(longest) < lengths[:, None]
    return {"input_ids": tokens, "labels": tokens.masked_fill(~mask, -100), "attention_mask": mask.long()}


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("qwen2_5_vl", "aot_eager"),
        pytest.param("qwen3", "aot_eager", marks=pytest.mark.full),
        pytest.param("qwen2_5_vl", "inductor", marks=pytest.mark.full),
    ],
)
def test_nothing_is_compiled_after_the_first_steps(
    kind: str, backend: str, qwen2_5_vl_dir: Path, qwen3_dir: Path
) -> None:
    hf_dir = qwen3_dir if kind == "qwen3" else qwen2_5_vl_dir
    whole, plain = (TransformersModel({"init_from_hf_path": str(hf_dir)}) for _ in range(2))
    samples = make_samples(hf_dir)
    modules = modules_to_compile(whole.model, Fsdp2Config.from_dict({"compile": True}))
    apply_compile(whole.model, modules, backend, "fsdp2.yaml: compile")
    graphs = []
    with counting() as compiled:
        for step in range(2 * STEPS):
            losses = [each(**each.prepare(mixed_rows(samples, step)))["loss"] for each in (whole, plain)]
            torch.autograd.backward(losses)
            graphs.append(compiled().graphs)
            assert losses[0].item() == pytest.approx(losses[1].item(), rel=LIMITS.loss)
    for (name, parameter), other in zip(whole.named_parameters(), plain.parameters()):
        assert parameter.grad is not None and other.grad is not None, name
        assert float((parameter.grad - other.grad).norm()) <= LIMITS.norm * float(other.grad.norm()), name
    # a layer of text for one row and for many, with positions for all and for each; a block of images
    assert 0 < graphs[-1] == graphs[STEPS - 1] <= 5, graphs
