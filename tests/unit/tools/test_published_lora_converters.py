"""Published `mm-convert` commands about adapters: what they write, or the sentence that says what to pass to a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.support import families
from tests.support.tiny import tiny_qwen2_5_vl_dir
from tests.unit.tools.test_merge import adapted, loaded
from tests.unit.tools.test_published_converters import convert, make

_FORM = (
    "--cfg.parallel_config.tp_size 1 --cfg.common_model_config.enable_canonical_hf_struct true "
    "--cfg.common_model_config.model_prefix base_model.model. "
    "--cfg.common_model_config.new_transformers_weight_key true"
)
_LAYERS = "--cfg.parallel_config.llm_pp_layers {} --cfg.parallel_config.vit_pp_layers {}"
_STAGES = _LAYERS.format("[12,16]", "[32,0]")
_ROWS = _LAYERS.format("[[12,16]]", "[[32,0]]")

#: model, command, what becomes of it
MERGES = [
    (
        "mistral3",
        "Mistral3Converter merge_mm_lora_dcp_weight_to_base_hf --base_hf_dir HF --lora_dcp_dir RUN "
        "--lora_target_modules q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj --save_merged_hf_dir OUT",
    ),
    (
        "wan",
        "WanConverter merge_lora_to_base --cfg.source_path HF --cfg.target_path OUT --cfg.lora_path RUN "
        "--lora_alpha 8 --lora_rank 4",
    ),
]
#: model, command
TO_PEFT = [
    ("qwen2_5_vl", f"Qwen2_5_VLConverter lora_mm_to_hf --cfg.save_hf_dir OUT --cfg.mm_dir RUN {_STAGES} {_FORM}"),
    ("qwen3_vl", "Qwen3VLConverter lora_dcp_to_hf --load_dir RUN --save_dir OUT"),
    ("wan", "GenericDCPConverter lora_dcp_to_hf --load_dir RUN --save_dir OUT"),
]
NOTHING = [
    ("qwen3_vl", "Qwen3VLConverter lora_hf_to_dcp --hf_dir PEFT --dcp_dir OUT"),
    (
        "qwen2_5_vl",
        f"Qwen2_5_VLConverter lora_hf_to_mm --cfg.mm_dir OUT --cfg.hf_config.hf_dir PEFT {_ROWS} {_FORM}",
    ),
    ("wan", "WanConverter lora_hf_to_mm --cfg.source_path PEFT --cfg.target_path OUT"),
    ("wan", "WanConverter mm_to_dcp --cfg.source_path PEFT --cfg.target_path OUT"),
]


def prepare(kind: str, folder: Path) -> tuple[Path, Any, dict[str, Path]]:
    """A base directory, the model with adapters, and places: its PEFT directory, and a run folder of adapters."""
    if kind == "qwen2_5_vl":
        hf_dir = tiny_qwen2_5_vl_dir(folder / "hf", seed=3)
    elif kind == "wan":
        hf_dir = make("wan", folder / "hf")
    else:
        hf_dir = families.families()[kind].make(folder / "hf")
    settings = {"target_modules": ["to_q"]} if kind == "wan" else {}
    made = adapted(loaded(kind, hf_dir).float(), settings)
    made.save_pretrained(folder / "peft")
    tensors = load_file(folder / "peft/adapter_model.safetensors")
    stored = {f"model.{name.removeprefix('base_model.model.')}": value for name, value in tensors.items()}
    run = folder / "run"
    dcp.save(stored, checkpoint_id=run / "iter_0000003", no_dist=True)
    config = json.loads((folder / "peft/adapter_config.json").read_text())
    (run / "iter_0000003/state.json").write_text(json.dumps({"iteration": 3, "lora": config}))
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    return hf_dir, made, {"HF": hf_dir, "PEFT": folder / "peft", "RUN": run, "OUT": folder / "out"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("kind", "words"), MERGES)
def test_merges(kind: str, words: str, tmp_path: Path) -> None:
    hf_dir, made, places = prepare(kind, tmp_path)
    assert convert(words, **places) == 0
    expected = made.merge_and_unload().state_dict()
    found = loaded(kind, tmp_path / "out").state_dict()
    assert found.keys() == expected.keys()
    dtype = next(iter(load_file(next(hf_dir.glob("*.safetensors"))).values())).dtype
    for key, value in expected.items():
        torch.testing.assert_close(found[key].float(), value.to(dtype).float(), rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("kind", "words"),
    [case if n == 0 else pytest.param(*case, marks=pytest.mark.full) for n, case in enumerate(TO_PEFT)],
)
def test_adapters_of_a_checkpoint_become_a_peft_directory(kind: str, words: str, tmp_path: Path) -> None:
    _, _, places = prepare(kind, tmp_path)
    assert convert(words, **places) == 0
    written, expected = (load_file(places[p] / "adapter_model.safetensors") for p in ("OUT", "PEFT"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())
    config, of_peft = (json.loads((places[p] / "adapter_config.json").read_text()) for p in ("OUT", "PEFT"))
    assert config == of_peft


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("kind", "words"), NOTHING)
def test_nothing_to_convert(kind: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, places = prepare(kind, tmp_path)
    capsys.readouterr()
    assert convert(words, **places) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("nothing to convert") and line.endswith(f"--lora-load {places['PEFT']}")
    assert not places["OUT"].exists()
    assert convert(words.replace("PEFT", "HF"), **places) == (0 if "mm_to_dcp" in words else 1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_factor_that_is_not_that_of_the_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, places = prepare("wan", tmp_path)
    assert convert(MERGES[1][1].replace("--lora_alpha 8", "--lora_alpha 64"), **places) == 1
    sentence = "--lora_alpha 64 --lora_rank 4 makes the factor on the adapters' output 16, and those of"
    assert sentence in capsys.readouterr().err and not places["OUT"].exists()
