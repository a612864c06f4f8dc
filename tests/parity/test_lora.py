"""LoRA under FSDP2 against a peft + transformers loop: losses, gradient norms and trained adapters, fp32."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.compiled import run_entry_compiled
from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.lora_case import LoraCase, Targets
from tests.support.parallel_case import ParallelCase, differences
from tests.support.parallel_models import LAYOUTS, MODELS
from tests.support.reference import load_plain, rows_as_inputs, train_reference
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir, write_mixed_dataset

ROWS = 8
STEPS = 3
LOSS_TOLERANCE, NORM_TOLERANCE, WEIGHT_TOLERANCE = 1e-6, 1e-5, 1e-5
TEXT_TARGETS = ("q_proj", "v_proj", "down_proj")


@dataclass(frozen=True)
class Case:
    """A layout, and what has adapters."""

    world: int = 1
    micro: int = 2
    fsdp2: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    kind: str = "text"
    targets: tuple[str, ...] = TEXT_TARGETS
    peft: tuple[tuple[str, Any], ...] = ()


RECOMPUTED = {"recompute_modules": WRAP_TEXT}
COMPILED = {"compile": True, "compile_backend": "aot_eager"}
CASES = {
    "1 process": Case(),
    "2 processes": Case(2),
    "2 processes, meta init, rsLoRA": Case(
        2, flags={"init_model_with_meta_device": True, "lora_use_rslora": True}, peft=(("use_rslora", True),)
    ),
    "2 processes, DoRA": Case(2, flags={"lora_use_dora": True}, peft=(("use_dora", True),)),
    "4 processes, HSDP": Case(4, 1, {"sharding_size": 2}),
    "2 processes, accumulation": Case(2, 1),
    "2 processes, recompute": Case(2, fsdp2={**RECOMPUTED, "use_reentrant": False}),
    "2 processes, reentrant recompute": Case(2, fsdp2={**RECOMPUTED, "use_reentrant": True}),
    "2 processes, embedding trained whole": Case(
        2, flags={"lora_modules_to_save": "embed_tokens"}, peft=(("modules_to_save", ("embed_tokens",)),)
    ),
    "2 processes, vision-language": Case(
        2, kind="vl", targets=("q_proj", "v_proj", "model.visual.blocks.{0}.attn.qkv")
    ),
    "1 process, compiled": Case(fsdp2=COMPILED),
    "2 processes, compiled, recompute": Case(2, 1, {**COMPILED, **RECOMPUTED, "use_reentrant": False}),
    "2 processes, compiled, DoRA, reentrant recompute": Case(
        2,
        1,
        {**COMPILED, **RECOMPUTED, "use_reentrant": True},
        {"lora_use_dora": True},
        peft=(("use_dora", True),),
    ),
}


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="lora-"))


@functools.cache
def model_and_data(kind: str) -> tuple[Path, Path]:
    folder = workspace() / kind
    if kind == "text":
        hf_dir = tiny_qwen3_dir(folder / "hf", seed=3, tie=False)
    else:
        hf_dir = tiny_qwen2_5_vl_dir(folder / "hf", seed=3)
    return hf_dir, write_mixed_dataset(folder / "data", rows=ROWS, seed=5, images=kind != "text")


@functools.cache
def reference(
    kind: str, targets: tuple[str, ...], settings: tuple[tuple[str, Any], ...]
) -> tuple[Path, list[float], list[float], dict[str, torch.Tensor]]:
    """The directory of the adapters that training starts from; losses, norms, and the adapters at the end."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    hf_dir, data = model_and_data(kind)
    torch.manual_seed(11)
    # PEFT's own random B: with B zero, the first step has no gradient for A
    plain = [target.replace("{0}", "0") for target in targets]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=plain, init_lora_weights=False, **dict(settings))
    model = get_peft_model(load_plain(hf_dir), config)
    start = Path(tempfile.mkdtemp(dir=workspace()))
    model.save_pretrained(start)
    losses, norms, _ = train_reference(hf_dir, rows_as_inputs(hf_dir, data), STEPS, model=model)
    return start, losses, norms, get_peft_model_state_dict(model)


def frozen_settings(case: Case) -> tuple[tuple[str, Any], ...]:
    return tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in case.peft)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if "compiled" in name else []) for name in CASES]
)
def test_equals_peft(name: str, pools: dict[int, Any], tmp_path: Path) -> None:
    case = CASES[name]
    start, losses, norms, adapters = reference(case.kind, case.targets, frozen_settings(case))
    hf_dir, data = model_and_data(case.kind)
    units = WRAP_TEXT if case.kind == "text" else WRAP
    files = write_run_files(tmp_path, hf_dir, data, fsdp2={"sub_modules_to_wrap": units, **case.fsdp2})
    flags = launch_flags(
        files,
        micro_batch_size=case.micro,
        global_batch_size=ROWS,
        train_iters=STEPS,
        save=tmp_path / "run",
        save_hf=True,
        lora_target_modules=",".join(case.targets),
        lora_r=4,
        lora_alpha=8,
        lora_load=start,
        **case.flags,
    )
    if "compile" in case.fsdp2:
        assert min(pools[case.world].run(run_entry_compiled, flags, timeout=170)) > 0
    else:
        pools[case.world].run(run_entry, flags, timeout=120)
    found_losses, found_norms = metrics_of(tmp_path / "run")
    assert found_losses == pytest.approx(losses, rel=LOSS_TOLERANCE)
    assert found_norms == pytest.approx(norms, rel=NORM_TOLERANCE)
    written = load_file(tmp_path / "run/hf/adapter_model.safetensors")
    assert written.keys() == adapters.keys()
    for key, value in adapters.items():
        torch.testing.assert_close(written[key], value, rtol=WEIGHT_TOLERANCE, atol=1e-7)
    assert json.loads((tmp_path / "run/hf/adapter_config.json").read_text())["r"] == 4


ATTENTION = Targets(("q_proj", "k_proj", "v_proj", "o_proj"))
LAYERS = Targets((*ATTENTION.modules, "gate_proj", "up_proj", "down_proj"))
EXPERTS = Targets(parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
BOTH = Targets(ATTENTION.modules, EXPERTS.parameters)
HEAD = Targets(("q_proj", "lm_head"))
EMBEDDING = Targets(("q_proj", "embed_tokens"))
#: PEFT keeps a tied weight one weight only if it is told to
TIED = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
SAVED = Targets(("q_proj",), settings=TIED, flags={"lora_modules_to_save": "embed_tokens"})
SAVED_BY_HEAD = Targets(("q_proj",), settings=TIED, flags={"lora_modules_to_save": "lm_head"})
#: PEFT knows what is trained whole as modules that are saved
MIXED = Targets(
    ("q_proj", "v_proj"),
    settings={"modules_to_save": ["visual"]},
    flags={"lora_apply_modules": "text_decoder", "lora_mixed_training": True},
)
TARGETS = {
    "mixed": MIXED,
    "attention": ATTENTION,
    "layers": LAYERS,
    "experts": EXPERTS,
    "both": BOTH,
    "head": HEAD,
    "embedding": EMBEDDING,
    "saved": SAVED,
    "saved by head": SAVED_BY_HEAD,
}
Row = tuple[str, str, str, str]
#: (model, what has adapters, layout, form of the rows): each kind of parallelism once
ROWS_OF_LAYOUTS: list[Row] = [
    ("qwen3", "layers", "FSDP2", "packed"),
    ("qwen3", "layers", "CP2 Ulysses", "packed"),
    ("qwen3", "layers", "CP2 ring", "packed"),
    ("qwen3", "layers", "TP2", "padded"),
    ("qwen3", "layers", "TP2 SP", "packed"),
    ("qwen3_moe", "attention", "EP2", "padded"),
    ("qwen3_moe", "experts", "FSDP2", "padded"),
    ("qwen3_moe", "both", "EP2", "packed"),
    ("qwen2_5_vl", "mixed", "FSDP2", "padded"),
]
REST_OF_LAYOUTS: list[Row] = [
    *[("qwen2_5_vl", "mixed", layout, "packed") for layout in ("CP2 ring", "TP2 SP")],
    *[("qwen2_5_vl", "layers", layout, "packed") for layout in ("FSDP2", "CP2 Ulysses", "CP2 ring", "TP2", "TP2 SP")],
    *[("qwen3_moe", "both", layout, "padded") for layout in ("HSDP 2x2", "CP2 Ulysses", "CP2 ring", "TP2", "TP2 SP")],
    *[("gpt_oss", "both", layout, "packed") for layout in ("FSDP2", "EP2", "EP2 x FSDP2", "TP2, EP2")],
    *[("qwen3_vl_moe", "both", layout, "padded") for layout in ("EP2 x FSDP2", "CP2 Ulysses, EP2")],
    ("deepseek_v3", "experts", "EP2, 2 copies", "padded"),
    ("qwen3", "layers", "TP2 x FSDP2", "padded"),
    ("qwen3", "layers", "TP2 SP x FSDP2", "packed"),
    ("qwen3", "layers", "TP2, CP2 Ulysses", "padded"),
    ("qwen3", "layers", "TP2, CP2 ring", "packed"),
    ("qwen3_moe", "both", "EP4", "padded"),
    ("qwen3_moe", "both", "EP2 x FSDP2", "packed"),
    ("qwen3_moe", "both", "CP2 ring, EP2 x FSDP2", "packed"),
    ("qwen3_moe", "both", "CP2 Ulysses, TP2, EP2", "padded"),
    ("qwen3_moe", "both", "CP2 Ulysses, TP2, EP4", "packed"),
]


@pytest.fixture(scope="session")
def lora_cases(pools: dict[int, Any]) -> Any:
    """(model, what has adapters) → its case."""
    case = functools.cache(lambda name: ParallelCase(name, MODELS[name], workspace() / name, pools))
    return functools.cache(lambda name, kind: LoraCase(case(name), TARGETS[kind], workspace() / f"{name}-{kind}"))


def assert_layout_equals_peft(row: Row, cases: Any, folder: Path, **changes: Any) -> None:
    name, kind, layout, form = row
    case = cases(name, kind)
    found = case.run(LAYOUTS[layout], form, folder / "case", save_hf=True, **changes)
    plain = case.plain(form)
    assert found.gradients.keys() == plain.gradients.keys()
    assert differences(found, plain).problems() == []
    alone = case.alone(form)
    assert differences(found, alone).problems() == []
    assert found.rows == alone.rows and found.counts == alone.counts
    exported = case.valid_loss_of(folder / "case/run/hf")
    assert exported == pytest.approx(found.valid_loss, rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("row", ROWS_OF_LAYOUTS, ids=", ".join)
def test_layout_equals_peft(row: Row, lora_cases: Any, tmp_path: Path) -> None:
    assert_layout_equals_peft(row, lora_cases, tmp_path)


@pytest.mark.parametrize(
    ("row", "compute_mode"),
    [
        (("qwen3", "head", "TP2", "packed"), "chunk"),
        *[
            pytest.param((name, "head", layout, "padded"), mode, marks=pytest.mark.full)
            for name in ("qwen3", "qwen3_moe")
            for layout in ("FSDP2", "TP2", "TP2 SP x FSDP2")
            for mode in ("default", "chunk")
        ],
    ],
    ids=str,
)
def test_adapters_of_the_output_layer(row: Row, compute_mode: str, lora_cases: Any, tmp_path: Path) -> None:
    """The loss in chunks, and that of a split vocabulary, compute logits without the layer's forward method."""
    balance = {"router_aux_loss_coef": MODELS[row[0]].balance} if MODELS[row[0]].balance else {}
    loss = {"loss_cfg": {**balance, "compute_mode": compute_mode, "chunk_size": 3}}
    assert_layout_equals_peft(row, lora_cases, tmp_path, model=loss)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("saved", "FSDP2"),
        *[
            pytest.param(kind, layout, marks=pytest.mark.full)
            for kind, layout in (
                ("saved", "TP2"),
                ("saved", "CP2 Ulysses"),
                ("saved by head", "FSDP2"),
                ("embedding", "FSDP2"),
                ("embedding", "CP2 ring"),
            )
        ],
    ],
)
def test_tied_weights(kind: str, layout: str, lora_cases: Any, tmp_path: Path) -> None:
    """Trained whole, both uses of the one weight get gradients; as a target, only the embedding changes."""
    assert_layout_equals_peft(("qwen3", kind, layout, "packed"), lora_cases, tmp_path)


MEMORY = {"recompute_modules": WRAP_TEXT, "activation_offload_modules": WRAP_TEXT, "use_reentrant": False}
CHUNKS = {"chunk_mbs_modules": WRAP_TEXT, "chunk_mbs_size": 1}
CHUNKS |= {"chunk_mbs_kwargs": ["attention_mask", "position_ids", "position_embeddings"]}
EXPERT_UNITS = {"sub_modules_to_wrap": [*WRAP_TEXT, "model.layers.{0,2}.mlp.experts"]}
FEATURES: dict[str, tuple[Row, dict[str, Any]]] = {
    "activation offload and chunks": (("qwen3", "layers", "FSDP2", "padded"), {**MEMORY, **CHUNKS}),
    "experts as units": (("qwen3_moe", "both", "FSDP2", "padded"), EXPERT_UNITS),
    "experts over ranks, recomputed": (("qwen3_moe", "both", "EP2", "padded"), MEMORY),
    "experts, reentrant recompute": (
        ("qwen3_moe", "experts", "FSDP2", "padded"),
        {"recompute_modules": WRAP_TEXT, "use_reentrant": True},
    ),
    "parameters in host memory": (("qwen3", "layers", "FSDP2", "packed"), {"offload_to_cpu": True}),
    "ignored modules": (("qwen3", "layers", "FSDP2", "packed"), {"ignored_modules": ["model.layers.{0}"]}),
    "HSDP": (("qwen3", "layers", "HSDP 2x2", "packed"), {}),
    "tensor parallelism, recomputed": (("qwen3", "layers", "TP2 SP", "packed"), MEMORY),
}


def test_dropout_by_seed(pools: dict[int, Any], tmp_path: Path) -> None:
    """One process draws what a peft loop draws that is seeded with --seed before its first step; and when resumed."""
    from peft import PeftModel

    start, without, *_ = reference("text", TEXT_TARGETS, ())
    hf_dir, data = model_and_data("text")
    inputs = rows_as_inputs(hf_dir, data)

    def run(name: str, iters: int, **flags: Any) -> tuple[list[float], list[float]]:
        files = write_run_files(tmp_path / f"{name}{iters}", hf_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
        settings = {"micro_batch_size": 1, "global_batch_size": ROWS, "save": tmp_path / name, "log_row_ids": True}
        lora = {"lora_target_modules": ",".join(TEXT_TARGETS), "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.3}
        words = launch_flags(files, **settings, **lora, train_iters=iters, seed=7, **flags)
        pools[1].run(run_entry, words, timeout=120)
        return metrics_of(tmp_path / name)

    found = run("whole", STEPS, lora_load=start)
    lines = (tmp_path / "whole/rows/rank0.jsonl").read_text().splitlines()
    rows = [json.loads(line)["rows"] for line in lines]
    dropping = shutil.copytree(start, tmp_path / "dropping") / "adapter_config.json"
    dropping.write_text(json.dumps({**json.loads(dropping.read_text()), "lora_dropout": 0.3}))
    model = PeftModel.from_pretrained(load_plain(hf_dir), dropping.parent, is_trainable=True)
    torch.manual_seed(7)
    losses, norms, _ = train_reference(hf_dir, inputs, STEPS, rows_of=lambda step: rows[step], model=model)
    assert found[0] == pytest.approx(losses, rel=LOSS_TOLERANCE)
    assert found[1] == pytest.approx(norms, rel=NORM_TOLERANCE)
    assert losses[0] != pytest.approx(without[0], rel=1e-4)
    run("broken", 2, lora_load=start)
    assert run("broken", STEPS, load=tmp_path / "broken") == found


@pytest.mark.full
@pytest.mark.parametrize("layout", ["TP2", "TP2 SP x FSDP2", "CP2 ring"])
def test_dropout_over_ranks(layout: str, lora_cases: Any, tmp_path: Path) -> None:
    """Tensor-parallel ranks drop the same inputs of whole matrices: their copies stay equal, as `run` checks."""
    case = lora_cases("qwen3", "layers")
    found = case.run(LAYOUTS[layout], "packed", tmp_path / "case", lora_dropout=0.3)
    assert 1e-5 < abs(found.losses[0] / case.alone("packed").losses[0] - 1) < 0.1


@pytest.mark.full
@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, lora_cases: Any, tmp_path: Path) -> None:
    row, fsdp2 = FEATURES[name]
    assert_layout_equals_peft(row, lora_cases, tmp_path, fsdp2=fsdp2)


@pytest.mark.full
@pytest.mark.parametrize("row", REST_OF_LAYOUTS, ids=", ".join)
def test_rest_of_layouts(row: Row, lora_cases: Any, tmp_path: Path) -> None:
    assert_layout_equals_peft(row, lora_cases, tmp_path)
