"""Published `mm-convert` commands: names of the generic conversion, or one sentence that says what to do instead."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mindspeed_mm.tools.convert import _build_parser, main
from tests.support import families
from tests.support.tiny_diffusers import build_diffusers
from tests.support.tiny_families import FAMILIES, assert_same, reference_tensors, tiny_family_dir, weights_in

#: converter → direction → its published arguments
ARGUMENTS: dict[str, dict[str, str]] = {
    "GenericDCPConverter": {
        "hf_to_dcp": "hf_dir dcp_dir dcp_prefix hf_prefix tie_weight_mapping fused_linear_names",
        "dcp_to_hf": "load_dir save_dir model_assets_dir dcp_prefix hf_prefix fused_linear_names",
    },
    "ExpertMergeDcpConverter": {
        "hf_to_dcp": "hf_dir save_dir dcp_prefix hf_prefix",
        "dcp_to_hf": "hf_dir dcp_dir save_dir dcp_prefix hf_prefix",
    },
    "Mistral3Converter": {
        "hf_to_dcp": "hf_dir dcp_dir is_lora_base",
        "dcp_to_hf": "load_dir save_dir model_assets_dir",
        "lora_hf_to_dcp": "hf_dir dcp_dir",
        "merge_mm_lora_dcp_weight_to_base_hf": "base_hf_dir lora_dcp_dir lora_target_modules save_merged_hf_dir "
        "scaling",
    },
    "Qwen3VLConverter": {
        "hf_to_dcp": "hf_dir dcp_dir tie_weight is_lora_base",
        "dcp_to_hf": "load_dir save_dir model_assets_dir to_bf16",
        "lora_hf_to_dcp": "hf_dir dcp_dir",
    },
    "Qwen35Converter": {
        "hf_to_dcp": "hf_dir dcp_dir dcp_prefix hf_prefix tie_weight_mapping fused_linear_names num_workers",
        "dcp_to_hf": "dcp_dir save_hf_dir origin_hf_dir dcp_prefix hf_prefix fused_linear_names to_bf16 "
        "keep_origin_mtp_weights num_workers trust_remote_code",
    },
    **{
        name: {
            "hf_to_mm": "cfg.mm_dir cfg.hf_config.hf_dir cfg.llm_hf_config.hf_dir cfg.parallel_config.llm_pp_layers "
            "cfg.parallel_config.vit_pp_layers cfg.parallel_config.audio_pp_layers cfg.parallel_config.tp_size "
            "cfg.parallel_config.vit_tp_size cfg.parallel_config.audio_tp_size cfg.parallel_config.ep_size "
            "cfg.common_model_config.enable_canonical_hf_struct cfg.save_vit_only cfg.trust_remote_code",
            "mm_to_hf": "cfg.save_hf_dir cfg.mm_dir cfg.hf_config.hf_dir cfg.parallel_config.llm_pp_layers "
            "cfg.parallel_config.vit_pp_layers cfg.parallel_config.tp_size cfg.trust_remote_code",
            "resplit": "cfg.source_dir cfg.target_dir cfg.source_parallel_config.llm_pp_layers "
            "cfg.source_parallel_config.tp_size cfg.target_parallel_config.vit_pp_layers",
        }
        for name in (
            "GlmConverter",
            "InternVLConverter",
            "Qwen2VLConverter",
            "Qwen2_5_OmniConverter",
            "Qwen2_5_VLConverter",
            "Qwen3VLMegatronConverter",
        )
    },
    **{
        name: {
            "hf_to_mm": "cfg.source_path cfg.target_path cfg.target_parallel_config.pp_layers",
            "mm_to_hf": "cfg.source_path cfg.target_path cfg.hf_dir",
            "mm_to_dcp": "cfg.source_path cfg.target_path",
            "resplit": "cfg.source_path cfg.target_path cfg.target_parallel_config.tp_size",
        }
        for name in ("CogVideoConverter", "HunyuanVideoConverter", "WanConverter")
    },
}

_LAYOUT = "--cfg.parallel_config.llm_pp_layers [[2,0]] --cfg.parallel_config.vit_pp_layers [[0,2]]"
_STAGES = "--cfg.parallel_config.llm_pp_layers [2,0] --cfg.parallel_config.vit_pp_layers [1,1]"
_AUDIO = " --cfg.parallel_config.audio_pp_layers [[1,1]] --cfg.parallel_config.vit_tp_size 1"
_TO_MM = "hf_to_mm --cfg.hf_config.hf_dir HF --cfg.mm_dir DCP --cfg.parallel_config.tp_size 2 " + _LAYOUT
_TO_HF = "mm_to_hf --cfg.hf_config.hf_dir HF --cfg.mm_dir DCP --cfg.save_hf_dir OUT " + _STAGES
_FORM = " --cfg.common_model_config.enable_canonical_hf_struct true"
_DCP = "hf_to_dcp --hf_dir HF --dcp_dir DCP"
_BACK = "dcp_to_hf --load_dir DCP --save_dir OUT --model_assets_dir HF"

#: converter, model, words there, words back
CONVERSIONS = [
    ("Qwen2_5_VLConverter", "qwen2_5_vl", _TO_MM + _FORM, _TO_HF + _FORM),
    pytest.param(
        "Qwen2_5_VLConverter",
        "qwen2_5_vl",
        _TO_MM.replace("hf_to_mm", "hf_to_mm_ldt"),
        _TO_HF,
        marks=pytest.mark.full,
    ),
    ("Qwen3VLMegatronConverter", "qwen3_vl_moe hub", _TO_MM + " --cfg.parallel_config.ep_size 2", _TO_HF),
    ("Qwen2_5_OmniConverter", "qwen2_5_omni hub", _TO_MM + _AUDIO, _TO_HF),
    pytest.param(
        "InternVLConverter",
        "internvl tied",
        _TO_MM + " --cfg.trust_remote_code true",
        _TO_HF,
        marks=pytest.mark.full,
    ),
    ("Qwen3VLConverter", "qwen3_vl_moe hub", _DCP + " --is_lora_base false", _BACK + " --to_bf16 False"),
    (
        "ExpertMergeDcpConverter",
        "qwen2_5_omni hub",
        "hf_to_dcp --hf_dir HF --save_dir DCP",
        "dcp_to_hf --hf_dir HF --dcp_dir DCP/release --save_dir OUT --dcp_prefix= ",
    ),
    ("Mistral3Converter", "mistral3", _DCP + " --is_lora_base true", _BACK),
    pytest.param("Qwen2VLConverter", "qwen2_vl", _TO_MM, _TO_HF, marks=pytest.mark.full),
    pytest.param("GlmConverter", "glm4v", _TO_MM, _TO_HF, marks=pytest.mark.full),
    (
        "Qwen35Converter",
        "qwen3_5",
        _DCP + " --num_workers 0",
        "dcp_to_hf --save_hf_dir OUT --dcp_dir DCP/release --origin_hf_dir HF --to_bf16 false --num_workers 0",
    ),
    (
        "WanConverter",
        "wan",
        "hf_to_mm --cfg.source_path HF --cfg.target_path DCP --cfg.target_parallel_config.pp_layers [1,1]",
        "mm_to_hf --cfg.source_path DCP --cfg.target_path OUT --cfg.hf_dir HF",
    ),
]


def convert(words: str, **places: Path) -> int:
    """Run a command with HF, DCP, OUT exchanged for places."""
    exchanged = words.split()
    for name, place in places.items():
        exchanged = [str(place) + w.removeprefix(name) if w.partition("/")[0] == name else w for w in exchanged]
    return main(exchanged)


def make(model: str, path: Path) -> Path:
    """A tiny HF directory in bfloat16, or in the dtype of its family."""
    if model in FAMILIES:
        return tiny_family_dir(path, model, dtype=torch.bfloat16)
    if model == "wan":
        build_diffusers("wan").to(torch.bfloat16).save_pretrained(path)
        return path
    if model == "qwen3_5":
        return _qwen3_5(path)
    return families.families()[model].make(path)


def _qwen3_5(path: Path) -> Path:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["linear_attention", "full_attention"]}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 12, "num_heads": 2, "out_hidden_size": 16}
    config = Qwen3_5Config(text_config=text, vision_config={**vision, "num_position_embeddings": 16})
    Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("converter", ARGUMENTS)
def test_published_directions_and_arguments_are_there(converter: str) -> None:
    _, known = _build_parser([converter])
    for direction, arguments in ARGUMENTS[converter].items():
        assert {f"--{name}" for name in arguments.split()} <= known[converter][direction], direction


@pytest.mark.parametrize(("converter", "model", "there", "back"), CONVERSIONS)
def test_a_published_name_is_the_generic_conversion(
    tmp_path: Path, converter: str, model: str, there: str, back: str
) -> None:
    """The same bytes as GenericDCPConverter's, and back to the bytes of the files."""
    hf_dir = make(model, tmp_path / "hf")
    places = {"HF": hf_dir, "DCP": tmp_path / "dcp", "OUT": tmp_path / "out"}
    assert convert(f"{converter} {there}", **places) == 0
    assert convert(f"GenericDCPConverter {_DCP}", HF=hf_dir, DCP=tmp_path / "generic") == 0
    one, other = ((tmp_path / name / "release" / "__0_0.distcp").read_bytes() for name in ("dcp", "generic"))
    assert one == other
    assert convert(f"{converter} {back}", **places) == 0
    assert_same(weights_in(tmp_path / "out"), weights_in(hf_dir))


# --- answers without a conversion ----------------------------------------------------------------------------------

_LORA = "adapters are PEFT's here, for every model: GenericDCPConverter merge_lora adds them to their base"
_LAYERS = "--cfg.source_parallel_config.llm_pp_layers [1,1] --cfg.target_parallel_config.llm_pp_layers [2]"

#: words, the sentence on standard error
REFUSED = [
    ("Qwen3TTSConverter dcp_to_hf --speaker_name x", "neither transformers nor diffusers has a class for it"),
    ("MOSSTTSConverter dcp_to_hf --load_dir x", "MOSS-TTS (moss_tts) can't be trained here"),
    ("BagelConverter hf_to_mm --cfg.source_path x", "BAGEL can't be trained here"),
    ("VACEConverter mm_to_hf --cfg.source_path x", "pretrain_sora.py has no predictor for it"),
    ("WanConverter layerzero_to_mm --cfg.source_path x", "convert them to a diffusers directory where they were"),
    ("Qwen35Converter merge_lora --base x", _LORA),
    (
        "Mistral3Converter merge_mm_lora_dcp_weight_to_base_hf --base_hf_dir x",
        "the following arguments are required: --lora_dcp_dir, --save_merged_hf_dir",
    ),
    (
        "WanConverter merge_lora_to_base --cfg.source_path x --cfg.target_path y --cfg.lora_path z --lora_alpha 64",
        "--lora_alpha and --lora_rank are given together, or neither",
    ),
    ("Qwen3VLConverter resplit --cfg.source_dir x", "a checkpoint fits every layout; pass the folder as it is"),
    ("Mistral3Converter hf_to_mm --cfg.mm_dir x", "writes torch_dcp, which every backend starts from"),
    ("Qwen2_5VLConverter hf_to_mm", "is no command of mm-convert; did you mean 'Qwen2_5_VLConverter'"),
    ("WanConvertor hf_to_mm", "did you mean 'WanConverter'"),
    ("Qwen2VLConverter hf_to_mn", "no direction 'hf_to_mn'; did you mean 'hf_to_mm'"),
    ("WanConverter hf_to_mm --cfg.sorce_path x", "no argument '--cfg.sorce_path'; did you mean '--cfg.source_path'"),
    (
        "Qwen2VLConverter hf_to_mm",
        "Qwen2VLConverter hf_to_mm: the following arguments are required: --cfg.mm_dir, --cfg.hf_config.hf_dir; ",
    ),
    (
        "Qwen2VLConverter hf_to_mm --cfg.hf_config.hf_dir x --cfg.mm_dir y --cfg.parallel_config.tp_size two",
        'Parser key "cfg.parallel_config.tp_size": Expected a',
    ),
    (
        "Qwen35Converter dcp_to_hf --dcp_dir x --save_hf_dir y --keep_origin_mtp_weights true",
        "transformers' class has no multi-token prediction layers",
    ),
    (
        "Qwen2VLConverter hf_to_mm --cfg.hf_config.hf_dir x --cfg.mm_dir y --cfg.save_vit_only true",
        "--cfg.save_vit_only is true; a checkpoint holds all parts of a model",
    ),
    (
        "InternVLConverter hf_to_mm --cfg.hf_config.hf_dir x --cfg.mm_dir y --cfg.llm_hf_config.hf_dir z",
        "the weights of all parts are read from one directory, --cfg.hf_config.hf_dir",
    ),
    (
        "WanConverter hf_to_mm --cfg.source_path x --cfg.target_path y --cfg.hf_dir z",
        "--cfg.hf_dir is 'z'; hf_to_mm reads --cfg.source_path alone",
    ),
    (
        f"Qwen2VLConverter resplit --cfg.source_dir x --cfg.target_dir y {_LAYERS.replace('[2]', '[3]')}",
        "--cfg.target_parallel_config.llm_pp_layers [3] adds up to 3, and --cfg.source_parallel_config.llm_pp_layers",
    ),
    (
        "Qwen2VLConverter hf_to_mm --cfg.hf_config.hf_dir CHAT --cfg.mm_dir y --cfg.trust_remote_code true",
        "holds InternVL in the layout of its authors' own code",
    ),
    ("WanConverter resplit --cfg.source_path OLDER --cfg.target_path y", "mp_rank_00 is of Megatron's torch format"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED)
def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str) -> None:
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "config.json").write_text('{"model_type": "internvl_chat"}')
    (tmp_path / "older/release/mp_rank_00").mkdir(parents=True)
    (tmp_path / "older/latest_checkpointed_iteration.txt").write_text("release")
    assert convert(words, CHAT=tmp_path / "chat", OLDER=tmp_path / "older") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(("ConfigError: ", "CheckpointError: ")) and sentence in line
    assert "invalid choice" not in line and "model.json" not in line


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (f"Qwen2_5_VLConverter resplit --cfg.source_dir DCP --cfg.target_dir OUT {_LAYERS}", "fits every layout"),
        ("WanConverter resplit --cfg.source_path DCP --cfg.target_path OUT", "a checkpoint fits every layout"),
        ("WanConverter mm_to_dcp --cfg.source_path DCP --cfg.target_path OUT", "write torch_dcp already"),
        ("WanConverter mm_to_dcp --cfg.source_path HF --cfg.target_path HF", "write torch_dcp already"),
        ("WanConverter hf_to_mm --cfg.source_path HF --cfg.target_path HF", "into the same directory"),
    ],
)
def test_nothing_to_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, reason: str) -> None:
    places = {"HF": make("wan", tmp_path / "hf"), "DCP": tmp_path / "dcp", "OUT": tmp_path / "out"}
    assert convert(f"GenericDCPConverter {_DCP}", **places) == 0
    capsys.readouterr()
    before = sorted(tmp_path.rglob("*"))
    assert convert(words, **places) == 0
    (line,) = capsys.readouterr().out.splitlines()
    load = places["DCP" if "DCP" in words else "HF"]
    assert line.startswith("nothing to convert") and reason in line and line.endswith(f"--load {load}")
    assert sorted(tmp_path.rglob("*")) == before
    shutil.rmtree(load)
    assert convert(words, **places) == 1


# --- arguments that change the result -------------------------------------------------------------------------------


def test_to_bf16_says_what_is_written(tmp_path: Path) -> None:
    """A checkpoint in float32 of a model whose files are bfloat16."""
    hf_dir = make("qwen3_5", tmp_path / "hf")
    trained = {f"model.{name}": tensor for name, tensor in reference_tensors(hf_dir).items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(trained, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for to_bf16, dtype in (("true", "bfloat16"), ("false", "float32"), (None, "bfloat16")):
        out = tmp_path / f"out {to_bf16}"
        words = "Qwen35Converter dcp_to_hf --dcp_dir DCP --origin_hf_dir HF --save_hf_dir OUT "
        words += f"--to_bf16 {to_bf16}" if to_bf16 else ""
        assert convert(words, DCP=tmp_path / "dcp", HF=hf_dir, OUT=out) == 0
        assert {str(t.dtype) for t in weights_in(out).values()} == {f"torch.{dtype}"}
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--cfg.parallel_config.llm_pp_layers [[1,2]]", "llm_pp_layers [[1, 2]] adds up to 3; the model has 2"),
        ("--cfg.parallel_config.vit_pp_layers [[1],[0]]", "vit_pp_layers [[1], [0]] adds up to 1"),
        (f"{_LAYOUT} --cfg.parallel_config.vit_pp_layers [[2]]", "name different numbers of pipeline stages"),
        ("--cfg.parallel_config.audio_pp_layers [[2]]", "audio_pp_layers is [[2]]; the model has no such part"),
        ("--cfg.parallel_config.tp_size 4", "tp_size is 4; the model has 2 key-value heads"),
        ("--cfg.parallel_config.tp_size 0", "tp_size is 0; the model has 4 attention heads"),
        ("--cfg.parallel_config.vit_tp_size 3", "vit_tp_size is 3; the model has 2 heads in the vision tower"),
        ("--cfg.parallel_config.ep_size 2", "ep_size is 2; the model has 0 experts"),
    ],
)
def test_a_layout_that_does_not_fit_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    hf_dir = make("qwen2_5_vl", tmp_path / "hf")
    capsys.readouterr()  # the bar of writing the directory
    command = f"Qwen2_5_VLConverter hf_to_mm --cfg.hf_config.hf_dir HF --cfg.mm_dir DCP {words}"
    assert convert(command, HF=hf_dir, DCP=tmp_path / "dcp") == 1
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: --cfg.parallel_config") and sentence in error
    assert not (tmp_path / "dcp").exists()


def test_a_layout_is_said_to_have_no_effect(tmp_path: Path, said: list[str]) -> None:
    hf_dir = make("qwen2_5_vl", tmp_path / "hf")
    plain = "Qwen2_5_VLConverter hf_to_mm --cfg.hf_config.hf_dir HF --cfg.mm_dir DCP "
    assert convert(plain, HF=hf_dir, DCP=tmp_path / "one") == 0 and said == []
    assert convert(plain + _LAYOUT, HF=hf_dir, DCP=tmp_path / "two") == 0
    assert said == ["--cfg.parallel_config has no effect: a checkpoint fits every layout"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("Qwen2VLConverter hf_to_mm --cfg.hf_config.hf_dir HF --cfg.mm_dir DCP", "'qwen3'; expected qwen2_vl, and"),
        ("Qwen3VLConverter hf_to_dcp --hf_dir HF --dcp_dir DCP", "expected qwen3_vl or qwen3_vl_moe"),
        ("WanConverter hf_to_mm --cfg.source_path HF --cfg.target_path DCP", "expected WanTransformer3DModel"),
    ],
)
def test_another_family_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert convert(words, HF=make("qwen3", tmp_path / "hf"), DCP=tmp_path / "dcp") == 1
    error = capsys.readouterr().err
    assert sentence in error and "GenericDCPConverter converts any other" in error


# --- the other two ways to give arguments ---------------------------------------------------------------------------


def _from_file(tmp_path: Path, hf_dir: Path, capsys: pytest.CaptureFixture[str], _: pytest.MonkeyPatch) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["Qwen2_5_VLConverter", "hf_to_mm", "--print_config=comments"])
    assert ended.value.code == 0
    template = capsys.readouterr().out
    filled = template.replace("mm_dir: null", f"mm_dir: {tmp_path / 'dcp'}").replace(
        "hf_dir: null", f"hf_dir: {hf_dir}", 1
    )
    assert filled != template
    (tmp_path / "convert.yaml").write_text(filled.replace("llm_pp_layers: null", "llm_pp_layers: [[2]]"))
    return f"--config {tmp_path / 'convert.yaml'}"


def _from_environment(
    tmp_path: Path, hf_dir: Path, _: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    prefix = "MM_CONVERT_QWEN2_5_VLCONVERTER__HF_TO_MM__CFG__"
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    monkeypatch.setenv(f"{prefix}MM_DIR", str(tmp_path / "dcp"))
    monkeypatch.setenv(f"{prefix}HF_CONFIG__HF_DIR", str(hf_dir))
    monkeypatch.setenv(f"{prefix}PARALLEL_CONFIG__LLM_PP_LAYERS", "[[2]]")
    return ""


@pytest.mark.parametrize("given", [_from_file, _from_environment])
def test_nested_arguments_from_elsewhere(
    tmp_path: Path,
    said: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    given: Callable[..., str],
) -> None:
    hf_dir = make("qwen2_5_vl", tmp_path / "hf")
    words = given(tmp_path, hf_dir, capsys, monkeypatch)
    assert convert(f"Qwen2_5_VLConverter hf_to_mm {words}") == 0
    assert (tmp_path / "dcp" / "release" / "__0_0.distcp").is_file()
    assert "--cfg.parallel_config has no effect: a checkpoint fits every layout" in said
