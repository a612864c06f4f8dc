"""Merging adapters: the weights of PEFT's own merge_and_unload, and the outputs of the base with its adapters, fp32."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from mindspeed_mm.tools.convert import main as mm_convert
from tests.support.families import families
from tests.support.reference import load_plain
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir
from tests.support.tiny_diffusers import build_diffusers, wan_inputs


@dataclass(frozen=True)
class Case:
    """A base model, and settings of PEFT's LoraConfig."""

    base: str = "text"
    peft: dict[str, Any] = field(default_factory=dict)


_EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CASES = {
    "linear": Case(),
    "rsLoRA": Case(peft={"use_rslora": True}),
    "DoRA": Case(peft={"use_dora": True}),
    "embedding": Case(peft={"target_modules": ["embed_tokens", "v_proj"]}),
    "DoRA of an embedding": Case(peft={"target_modules": ["embed_tokens", "v_proj"], "use_dora": True}),
    "trained whole": Case(peft={"modules_to_save": ["lm_head", "norm"]}),
    "ranks and alphas of their own": Case(
        peft={
            "rank_pattern": {"layers.0.self_attn.q_proj": 2},
            "alpha_pattern": {"v_proj": 6, "layers.1.self_attn.q.*": 3},
        }
    ),
    "experts": Case("qwen3_vl_moe", _EXPERTS),
    "one parameter of experts": Case("qwen3_vl_moe", {**_EXPERTS, "target_parameters": ["experts.down_proj"]}),
    "convolution": Case("vl", {"target_modules": ["proj", "qkv"]}),
    "DoRA of a convolution": Case("vl", {"target_modules": ["proj", "qkv"], "use_dora": True}),
    "Wan": Case("wan", {"target_modules": ["to_q", "ffn.net.2", "patch_embedding"]}),
}
DEFAULT = ("DoRA", "trained whole", "ranks and alphas of their own", "experts")


def base_of(kind: str, path: Path) -> tuple[Path, Any]:
    """A directory, and the model as its library loads it."""
    if kind == "wan":
        build_diffusers("wan").save_pretrained(path)
        return path, loaded(kind, path)
    makers = {"text": lambda: tiny_qwen3_dir(path, seed=3, tie=False), "vl": lambda: tiny_qwen2_5_vl_dir(path, seed=3)}
    made = makers[kind]() if kind in makers else families()[kind].make(path)
    return made, loaded(kind, made)


def loaded(kind: str, path: Path) -> Any:
    if kind == "wan":
        from diffusers import WanTransformer3DModel

        return WanTransformer3DModel.from_pretrained(path).eval()
    return load_plain(path).float().eval()


def output_of(kind: str, model: Any) -> torch.Tensor:
    with torch.no_grad():
        if kind == "wan":
            return model(**wan_inputs())[0]
        if kind == "vl":
            inner = model.get_base_model() if hasattr(model, "get_base_model") else model
            pixels = torch.linspace(-1, 1, 16 * inner.model.visual.patch_embed.proj.weight[0].numel()).view(16, -1)
            return inner.model.visual(pixels, grid_thw=torch.tensor([[1, 4, 4]]))[0]
        return model(input_ids=torch.arange(5, 17)[None]).logits


def adapted(model: Any, settings: dict[str, Any], seed: int = 5) -> Any:
    """With adapters of random values, also those whose first values are zero otherwise."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = {"target_modules": ["q_proj", "v_proj"], **settings}
        made = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **config))
        for name, param in made.named_parameters():
            if "magnitude" in name or "modules_to_save" in name:
                param.data += 0.1 * torch.randn_like(param)
    return made.eval()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in DEFAULT else [pytest.mark.full]) for n in CASES])
def test_equals_peft(name: str, tmp_path: Path) -> None:
    kind, settings = CASES[name].base, CASES[name].peft
    hf_dir, model = base_of(kind, tmp_path / "base")
    made = adapted(model, settings)
    made.save_pretrained(tmp_path / "adapter")
    expected = output_of(kind, made)
    assert (expected - output_of(kind, loaded(kind, hf_dir))).abs().max() > 1e-3
    words = f"GenericDCPConverter merge_lora --base {hf_dir} --adapter {tmp_path}/adapter --out {tmp_path}/merged"
    assert mm_convert(words.split()) == 0
    merged = loaded(kind, tmp_path / "merged")
    torch.testing.assert_close(output_of(kind, merged), expected, rtol=1e-5, atol=2e-6)
    of_peft = made.merge_and_unload().state_dict()
    found = merged.state_dict()
    assert found.keys() == of_peft.keys()
    for key, value in of_peft.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6, msg=key)


# --- spellings of other programs -------------------------------------------------------------------------------------


def _to_dcp(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    dcp.save(tensors, checkpoint_id=folder / "release", no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder


def spelled(way: str, adapter: Path, folder: Path) -> Path:
    """The same adapters as another program writes them."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    plain = {name.removeprefix("base_model.model."): value for name, value in tensors.items()}
    folder.mkdir()
    settings = (adapter / "adapter_config.json").read_text()
    inside = {name.replace(".weight", ".default.weight"): value for name, value in tensors.items()}
    if way == "diffusers":
        header = {f"transformer.{key}": value for key, value in json.loads(settings).items()}
        names = {f"transformer.{name}": value for name, value in plain.items()}
        metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(header)}
        save_file(names, folder / "pytorch_lora_weights.safetensors", metadata=metadata)
        return folder
    if way == "torch_dcp":
        wrapped = {name.replace("base_model.model.", "base_model.model.model.", 1): v for name, v in inside.items()}
        return _to_dcp(folder, wrapped)
    (folder / "adapter_config.json").write_text(settings)
    if way == "pickle":
        torch.save(plain, folder / "adapter_model.bin")
        return folder
    kinds = {"without a prefix": plain, "inside a model": inside, "numbered": inside}
    name = "lora_adapter_iteration_20" if way == "numbered" else "adapter_model"
    if way == "numbered":
        save_file({f"{name}2": value for name, value in plain.items()}, folder / "lora_adapter_iteration_3.safetensors")
    save_file(kinds[way], folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors" if way == "without a prefix" else folder


WAYS = ("without a prefix", "inside a model", "numbered", "pickle", "diffusers", "torch_dcp")


@pytest.mark.parametrize("way", WAYS)
def test_spellings_of_other_programs(way: str, tmp_path: Path) -> None:
    hf_dir, model = base_of("text", tmp_path / "base")
    adapted(model, {}).save_pretrained(tmp_path / "adapter")
    place = spelled(way, tmp_path / "adapter", tmp_path / "other")
    for adapter, out in ((tmp_path / "adapter", "expected"), (place, "found")):
        words = f"GenericDCPConverter merge_lora --base {hf_dir} --adapter {adapter} --out {tmp_path / out}"
        words += " --scaling 2" if way == "torch_dcp" and out == "found" else ""
        assert mm_convert(words.split()) == 0
    expected, found = (load_file(tmp_path / out / "model.safetensors") for out in ("expected", "found"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("name", ["experts", pytest.param("one parameter of experts", marks=pytest.mark.full)])
def test_experts_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    """A run's checkpoint stacks their adapters by expert; it merges, and becomes a PEFT directory, like PEFT's own."""
    from mindspeed_mm.models.common.expert_adapters import from_peft

    hf_dir, model = base_of("qwen3_vl_moe", tmp_path / "base")
    experts = next(len(param) for path, param in model.named_parameters() if path.endswith("experts.down_proj"))
    targets = tuple(CASES[name].peft["target_parameters"])
    parameters = [path for path, _ in model.named_parameters() if path.endswith(targets)]
    adapted(model, CASES[name].peft).save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    config["target_parameters"] = parameters  # a run names them by their whole paths
    stored = {}
    for key, value in load_file(tmp_path / "adapter/adapter_model.safetensors").items():
        own = key.removeprefix("base_model.model.")
        stacked = value
        if ".experts." in own:
            wanted = (experts, 4, value.shape[1]) if "lora_A" in own else (experts, value.shape[0], 4)
            owner = own.split(".lora_")[0].replace(".base_layer", "")
            stacked = from_peft(own, value, [f"{owner}.any"], torch.Size(wanted))
            assert stacked.dim() == 3
        stored[f"model.{own}"] = stacked.contiguous()
    (tmp_path / "run").mkdir()
    run = _to_dcp(tmp_path / "run", stored)
    (run / "release/state.json").write_text(json.dumps({"lora": config}))
    words = f"GenericDCPConverter merge_lora --base {hf_dir} --adapter"
    assert mm_convert([*words.split(), f"{tmp_path}/adapter", "--out", f"{tmp_path}/expected"]) == 0
    assert mm_convert([*words.split(), str(run), "--out", f"{tmp_path}/found"]) == 0
    expected, found = (loaded("qwen3_vl_moe", tmp_path / out).state_dict() for out in ("expected", "found"))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6, msg=key)
    words = f"GenericDCPConverter lora_dcp_to_hf --load_dir {run} --save_dir {tmp_path}/peft"
    assert mm_convert(words.split()) == 0
    of_peft, written = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("adapter", "peft"))
    assert of_peft.keys() == written.keys()
    assert all(torch.equal(written[key], value) for key, value in of_peft.items())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"lora_bias": True}, "adapters with lora_bias True can't be merged here, but by PEFT"),
        ({"lora_alpha": None}, "nothing beside the adapters says their alpha"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; expected LORA"),
    ],
)
def test_what_cannot_be_merged(
    change: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_dir, model = base_of("text", tmp_path / "base")
    adapted(model, {}).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    words = f"GenericDCPConverter merge_lora --base {hf_dir} --adapter {tmp_path}/adapter --out {tmp_path}/out"
    assert mm_convert(words.split()) == 1
    assert sentence in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--adapter BASE", "holds no adapters of LoRA (names with lora_A and lora_B)"),
        ("--adapter WAN", "tensors that Qwen3ForCausalLM has no layer for"),
        ("--adapter ADAPTER --scaling 3", "--scaling makes the factor on the adapters' output 3, and those of"),
        ("--adapter NOTHING", "holds no adapters: expected a PEFT directory"),
    ],
)
def test_adapters_that_do_not_fit(more: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_dir, model = base_of("text", tmp_path / "base")
    adapted(model, {}).save_pretrained(tmp_path / "adapter")
    adapted(base_of("wan", tmp_path / "wan base")[1], {"target_modules": ["to_q"]}).save_pretrained(tmp_path / "wan")
    places = {"BASE": hf_dir, "ADAPTER": tmp_path / "adapter", "WAN": tmp_path / "wan", "NOTHING": tmp_path}
    given = [str(places.get(word, word)) for word in more.split()]
    words = ["GenericDCPConverter", "merge_lora", "--base", str(hf_dir), "--out", str(tmp_path / "out"), *given]
    assert mm_convert(words) == 1
    assert sentence in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_merge_in_bf16_rounds_once(tmp_path: Path) -> None:
    hf_dir, model = base_of("text", tmp_path / "base")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    (tmp_path / "half/tokenizer.json").write_bytes((hf_dir / "tokenizer.json").read_bytes())
    adapted(loaded("text", tmp_path / "half"), {}).save_pretrained(tmp_path / "adapter")
    words = f"GenericDCPConverter merge_lora --base {tmp_path}/half --adapter {tmp_path}/adapter --out {tmp_path}/out"
    assert mm_convert(words.split()) == 0
    base, merged = (load_file(tmp_path / folder / "model.safetensors") for folder in ("half", "out"))
    adapters = load_file(tmp_path / "adapter/adapter_model.safetensors")
    changed = 0
    for key, value in merged.items():
        prefix = f"base_model.model.{key.removesuffix('.weight')}"
        expected = base[key].float()
        if f"{prefix}.lora_A.weight" in adapters:
            expected = expected + 2 * adapters[f"{prefix}.lora_B.weight"] @ adapters[f"{prefix}.lora_A.weight"]
            changed += 1
        assert value.dtype == torch.bfloat16 and torch.equal(value, expected.bfloat16()), key
    assert changed > 0
