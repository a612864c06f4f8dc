"""LoRA of generation models against peft + diffusers: losses, gradients, trained and averaged adapters, fp32.

The runs are those of `test_generation_layouts`: the real entry script, on real clips; the loop is the one there, with
adapters that diffusers' own `add_adapter` inserts. What is exported is loaded by diffusers' pipelines.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.tools.convert import main as mm_convert
from tests.parity.test_generation_layouts import (
    BLOCKS,
    ROWS,
    SEED,
    STEPS,
    Case,
    files_of,
    train_plainly,
    workspace,
)
from tests.support.launch import launch_flags, metrics_of, run_entry
from tests.support.predictors import cases
from tests.support.tiny_diffusers import diffusers_config, wan_inputs

#: as published launches name layers, and as diffusers' class does
PUBLISHED, OWN = "proj_q,proj_v,proj_out,ffn.2", ["to_q", "to_v", "to_out.0", "ffn.net.2"]
SETTINGS: dict[str, Any] = {"r": 4, "lora_alpha": 8}


@dataclass(frozen=True)
class Adapted:
    """A layout, further flags, and the settings of PEFT that they stand for."""

    case: Case = field(default_factory=Case)
    flags: dict[str, Any] = field(default_factory=dict)
    peft: tuple[tuple[str, Any], ...] = ()


RUNS = {
    "1 process, accumulation": Adapted(Case(1, 2)),
    "2 processes": Adapted(Case(2, 4)),
    "2 processes, recompute": Adapted(Case(2, 2, {"recompute_modules": BLOCKS, "use_reentrant": False})),
    "2 processes, DoRA": Adapted(Case(2, 4), {"lora_use_dora": True}, (("use_dora", True),)),
    "4 processes, HSDP, rsLoRA": Adapted(
        Case(4, 1, {"sharding_size": 2}), {"lora_use_rslora": True}, (("use_rslora", True),)
    ),
}
DEFAULT = ("2 processes, recompute",)


def with_adapters(settings: tuple[tuple[str, Any], ...] = ()) -> Any:
    """diffusers' model with adapters of random values, also those whose first values are zero otherwise."""
    from diffusers import WanTransformer3DModel
    from peft import LoraConfig

    model = WanTransformer3DModel.from_pretrained(workspace() / "transformer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model.add_adapter(LoraConfig(**SETTINGS, target_modules=OWN, init_lora_weights=False, **dict(settings)))
    return model.train()


@functools.cache
def reference(settings: tuple[tuple[str, Any], ...]) -> tuple[Path, list[float], list[float], dict[str, Any]]:
    """The directory of the first adapters; losses, norms, and trained and averaged adapters of the plain loop."""
    from diffusers import WanPipeline
    from peft import get_peft_model_state_dict

    model = with_adapters(settings)
    start = Path(tempfile.mkdtemp(dir=workspace()))
    config = {key: list(v) if isinstance(v, set) else v for key, v in model.peft_config["default"].to_dict().items()}
    WanPipeline.save_lora_weights(start, get_peft_model_state_dict(model), transformer_lora_adapter_metadata=config)
    losses, norms, average = train_plainly(model)
    trained = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
    average.copy_to([p for p in model.parameters() if p.requires_grad])
    return start, losses, norms, {"hf": trained, "hf_ema": get_peft_model_state_dict(model)}


def flags_of(run: Adapted, folder: Path, **more: Any) -> list[str]:
    settings: dict[str, Any] = {
        "micro_batch_size": run.case.micro,
        "global_batch_size": ROWS,
        "train_iters": STEPS,
        "seed": SEED,
        "save": folder / "run",
        "save_hf": True,
        "lora_target_modules": PUBLISHED,
        "lora_r": SETTINGS["r"],
        "lora_alpha": SETTINGS["lora_alpha"],
    }
    return launch_flags(files_of(run.case, folder / "files"), **{**settings, **run.flags, **more})


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in DEFAULT else [pytest.mark.full]) for n in RUNS])
def test_equals_peft_and_diffusers(name: str, pools: dict[int, Any], tmp_path: Path) -> None:
    run = RUNS[name]
    start, losses, norms, adapters = reference(run.peft)
    pools[run.case.world].run(run_entry, flags_of(run, tmp_path, lora_load=start), "pretrain_sora.py", timeout=120)
    found_losses, found_norms = metrics_of(tmp_path / "run")
    assert found_losses == pytest.approx(losses, rel=1e-5)
    assert found_norms == pytest.approx(norms, rel=1e-5)
    for folder, expected in adapters.items():
        written = load_file(tmp_path / "run" / folder / "pytorch_lora_weights.safetensors")
        assert written.keys() == {f"transformer.{key}" for key in expected}
        for key, value in expected.items():
            torch.testing.assert_close(written[f"transformer.{key}"], value, rtol=1e-5, atol=1e-6, msg=key)


# --- what is exported, and the other ways to go on -------------------------------------------------------------------


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**wan_inputs(seed=4))[0]


def pipeline_with(second: bool = False) -> Any:
    """diffusers' pipeline around the base transformer, without its other parts."""
    from diffusers import WanPipeline, WanTransformer3DModel

    parts = dict.fromkeys(("tokenizer", "text_encoder", "vae", "scheduler"))
    models = [WanTransformer3DModel.from_pretrained(workspace() / "transformer") for _ in range(1 + second)]
    return WanPipeline(**parts, transformer=models[0], transformer_2=models[1] if second else None)


@pytest.mark.parametrize("settings", [{}, pytest.param({"lora_use_dora": True}, marks=pytest.mark.full)])
def test_diffusers_loads_the_export(settings: dict[str, Any], pools: dict[int, Any], tmp_path: Path) -> None:
    """And inference makes of the checkpoint what it makes of the export, and of both merged."""
    from mindspeed_mm.tasks.generation.weights import load_predictor

    run = Adapted(Case(2, 4), {**settings, "lora_init": "gaussian", "lr": "3e-2"})
    pools[2].run(run_entry, flags_of(run, tmp_path), "pretrain_sora.py", timeout=120)
    export, base = tmp_path / "run/hf", workspace() / "transformer"
    how: dict[str, Any] = {"dtype": torch.float32, "ema": False}
    load = functools.partial(load_predictor, "WanTransformer3DModel", diffusers_config("wan"), **how)
    expected = outputs(load(tmp_path / "run")[0])
    plain = outputs(load(base)[0])
    assert (expected - plain).abs().max() > 1e-3
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=2e-6)
    close(outputs(load(base, adapters=export)[0]), expected)
    close(outputs(load(export, base=base)[0]), expected)

    pipeline = pipeline_with()
    pipeline.load_lora_weights(str(export))
    close(outputs(pipeline.transformer), expected)
    pipeline = pipeline_with(second=True)
    pipeline.load_lora_weights(str(export), load_into_transformer_2=True)
    close(outputs(pipeline.transformer_2), expected)
    close(outputs(pipeline.transformer), plain)
    alone = pipeline_with().transformer
    alone.load_lora_adapter(str(export), use_safetensors=True)
    close(outputs(alone), expected)

    words = f"GenericDCPConverter merge_lora --base {base} --adapter {tmp_path}/run --out {tmp_path}/merged"
    assert mm_convert(words.split()) == 0
    close(outputs(load(tmp_path / "merged")[0]), expected)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_resume_on_another_layout(dtype: str, pools: dict[int, Any], tmp_path: Path) -> None:
    """With averages; in bf16, losses are those of fp32 but for rounding, and adapters stay float32."""
    more = {"bf16": True} if dtype == "bf16" else {}

    def train(world: int, name: str, iters: int, **fsdp2: Any) -> list[float]:
        run = Adapted(Case(world, 2, fsdp2))
        save = tmp_path / name
        words = flags_of(run, tmp_path / f"{name}{iters}", save=save, load=save, train_iters=iters, lr="1e-2", **more)
        pools[world].run(run_entry, words, "pretrain_sora.py", timeout=120)
        return metrics_of(save)[0]

    unbroken = train(2, "unbroken", 4)
    train(2, "broken", 2)
    resumed = train(4, "broken", 4, sharding_size=2)
    assert resumed == pytest.approx(unbroken, rel=1e-5 if dtype == "fp32" else 5e-3)
    for folder in ("hf", "hf_ema"):
        first, second = (load_file(tmp_path / n / folder / "pytorch_lora_weights.safetensors") for n in RUN_FOLDERS)
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert value.dtype == torch.float32
            if dtype == "fp32":
                torch.testing.assert_close(second[key], value, rtol=1e-5, atol=1e-6, msg=key)


RUN_FOLDERS = ("unbroken", "broken")


def test_a_base_that_load_names(pools: dict[int, Any], tmp_path: Path) -> None:
    """As published launches name it: model.json describes the predictor, --load is the transformer's directory."""
    run = Adapted(Case(1, 8))
    start, losses, _, _ = reference(())
    words = flags_of(run, tmp_path, lora_load=start, load=workspace() / "transformer", save_hf=None)
    file = tmp_path / "files/model.json"
    content = json.loads(file.read_text())
    content["predictor"] = {"model_id": "wan", "config": diffusers_config("wan")}
    file.write_text(json.dumps(content))
    pools[1].run(run_entry, words, "pretrain_sora.py", timeout=120)
    assert metrics_of(tmp_path / "run")[0] == pytest.approx(losses, rel=1e-5)


def test_modules_trained_whole_make_a_peft_directory(pools: dict[int, Any], tmp_path: Path) -> None:
    """A file of diffusers' pipelines has no place for them."""
    from diffusers import WanTransformer3DModel
    from peft import PeftModel

    from mindspeed_mm.tasks.generation.weights import load_predictor

    run = Adapted(Case(2, 4), {"lora_modules_to_save": "proj_out", "lora_target_modules": "to_q", "lr": "1e-2"})
    pools[2].run(run_entry, flags_of(run, tmp_path), "pretrain_sora.py", timeout=120)
    base = WanTransformer3DModel.from_pretrained(workspace() / "transformer")
    of_peft = PeftModel.from_pretrained(base, tmp_path / "run/hf")
    how: dict[str, Any] = {"dtype": torch.float32, "ema": False}
    found, _ = load_predictor("WanTransformer3DModel", diffusers_config("wan"), tmp_path / "run", **how)
    torch.testing.assert_close(outputs(found), outputs(of_peft), rtol=1e-5, atol=2e-6)


# --- every family, in one process ------------------------------------------------------------------------------------

FAMILIES = {label: case for label, case in cases().items() if not label.endswith("-3.5")}
#: ends of layers that get adapters
_LAYERS_OF = ("to_q", "to_v", "proj", "net.2")


@pytest.mark.parametrize(
    "label", [pytest.param(n, marks=[] if n in ("flux-t2i", "sd3-t2i") else [pytest.mark.full]) for n in FAMILIES]
)
def test_a_family_equals_peft_and_diffusers(label: str) -> None:
    """The loss of a batch, and the gradients of all adapters."""
    import diffusers
    from peft import LoraConfig

    from mindspeed_mm.configs.lora import LoraOptions
    from mindspeed_mm.models.common.build_context import BuildContext, build_context
    from mindspeed_mm.models.generation.sora_model import SoRAModel

    name, case = FAMILIES[label]
    bare = SoRAModel(case.model_json(name))
    ends = [end for end in _LAYERS_OF if any(path.endswith(f".{end}") for path in layers_of(bare.predictor))]
    plain = getattr(diffusers, bare.family.model_class_name)(**case.config)
    plain.load_state_dict(bare.predictor.state_dict())
    plain.add_adapter(LoraConfig(r=2, lora_alpha=6, target_modules=ends, init_lora_weights=False))
    with build_context(BuildContext(lora=LoraOptions(target_modules=tuple(ends), r=2, alpha=6))):
        model = SoRAModel(case.model_json(name))
    model.predictor.load_state_dict(plain.state_dict())
    batch = model.prepare(case.batch([0, 1, 2]))
    output = model(**batch)
    (output["loss"] / output["denominator"]).backward()
    expected = case.plain(plain.train(), **{k: batch[k] for k in ("latents", "noise", "draws", "text", "conditions")})
    expected.backward()
    torch.testing.assert_close(output["loss"] / 3, expected, rtol=1e-5, atol=1e-7)
    ours = dict(model.predictor.named_parameters())
    trained = {key: param for key, param in plain.named_parameters() if param.requires_grad}
    assert trained and {key for key, param in ours.items() if param.requires_grad} == trained.keys()
    for key, param in trained.items():
        got = ours[key].grad
        assert (got is None) == (param.grad is None), key
        if got is not None:
            torch.testing.assert_close(got, param.grad, rtol=1e-5, atol=1e-6, msg=key)


def layers_of(model: torch.nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
