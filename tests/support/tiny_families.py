"""Hugging Face directories of many model families: config and weights only, every weight different from every other.

Names and shapes are those before transformers' conversions (one tensor per expert, `visual.*`, …). No expert matrix is
square, so that one that is transposed by mistake has the wrong shape. Directories are built once per
process and copied to where a test wants them.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file

_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
_QWEN3_MROPE = {**_MROPE, "mrope_interleaved": True}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []}
_TOKENS = {"image_token_id": 200, "video_token_id": 201, "vision_start_token_id": 202, "vision_end_token_id": 203}
_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_VISION |= {"spatial_merge_size": 2, "temporal_patch_size": 2}


def _text(**fields: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return {**sizes, **heads, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **fields}


def _qwen2_5_vision() -> dict[str, Any]:
    return {**_VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}


def _qwen2_5_vl(tie: bool) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = _text(rope_parameters=_MROPE)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=_qwen2_5_vision(), tie_word_embeddings=tie, **_TOKENS)
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3(tie: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_text(head_dim=16), tie_word_embeddings=tie))


def _qwen3_moe(tie: bool) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_text(head_dim=16), **_MOE, tie_word_embeddings=tie))


def _qwen3_vl_moe(tie: bool) -> Any:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = _text(head_dim=16, rope_parameters=_QWEN3_MROPE, **_MOE)
    vision = {**_VISION, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=tie, **_TOKENS)
    return Qwen3VLMoeForConditionalGeneration(config)


def _internvl(tie: bool) -> Any:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    vision |= {"image_size": [56, 56], "patch_size": [14, 14]}
    text = {"model_type": "qwen2", **_text()}
    config = InternVLConfig(
        text_config=text, vision_config=vision, image_token_id=200, downsample_ratio=0.5, tie_word_embeddings=tie
    )
    return InternVLForConditionalGeneration(config)


def _qwen2_5_omni(tie: bool) -> Any:
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    audio = {"num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "output_dim": 64}
    audio |= {"encoder_ffn_dim": 48, "n_window": 10, "max_source_positions": 100}
    config = Qwen2_5OmniThinkerConfig(
        text_config=_text(rope_parameters=_MROPE, tie_word_embeddings=tie),
        vision_config=_qwen2_5_vision(),
        audio_config=audio,
        audio_token_id=204,
        tie_word_embeddings=tie,
        **_TOKENS,
    )
    return Qwen2_5OmniThinkerForConditionalGeneration(config)


def _gpt_oss(tie: bool) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
    return GptOssForCausalLM(GptOssConfig(**_text(head_dim=16), **moe, tie_word_embeddings=tie))


def _experts_transposed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t.transpose(1, 2).contiguous() if ".mlp.experts." in n else t for n, t in tensors.items()}


def _under_thinker(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"thinker.{n}": t for n, t in tensors.items()}


_Maker = tuple[Callable[[bool], Any], bool]
_MAKERS: dict[str, _Maker] = {
    "qwen2_5_vl": (_qwen2_5_vl, False),
    "qwen2_5_vl tied": (_qwen2_5_vl, True),
    "qwen3": (_qwen3, False),
    "qwen3 tied": (_qwen3, True),
    "qwen3_moe": (_qwen3_moe, False),
    "qwen3_vl_moe": (_qwen3_vl_moe, False),
    "qwen3_vl_moe hub": (_qwen3_vl_moe, False),
    "internvl tied": (_internvl, True),
    "qwen2_5_omni": (_qwen2_5_omni, False),
    "qwen2_5_omni hub": (_qwen2_5_omni, False),
    "gpt_oss": (_gpt_oss, False),
}
# where the files on the hub differ from what transformers' save_pretrained writes
_HUB_LAYOUT = {"qwen3_vl_moe hub": _experts_transposed, "qwen2_5_omni hub": _under_thinker}
FAMILIES = tuple(_MAKERS)


def tiny_family_dir(
    path: str | Path, family: str, *, dtype: torch.dtype = torch.float32, max_shard_size: int | None = None
) -> Path:
    """Make a directory of `family`, one of FAMILIES.

    "… tied": the output layer is the input embedding. "… hub": as published, where transformers saves it otherwise.

    Args:
        path: the directory to make; it may exist.
        dtype: of the weights in the files and in config.json.
        max_shard_size: bytes of a file; None: one file and no index.
    """
    shutil.copytree(_built(family, dtype, max_shard_size), path, dirs_exist_ok=True)
    return Path(path)


def reference_tensors(hf_dir: str | Path) -> dict[str, torch.Tensor]:
    """What `from_pretrained` in float32 makes of a directory: parameters (under each name) and persistent buffers."""
    return dict(reference_model(hf_dir).state_dict())


def reference_model(hf_dir: str | Path) -> Any:
    """The model that `from_pretrained` makes of a directory, in float32; every weight must be there."""
    import transformers

    model_class = getattr(transformers, _architecture(hf_dir))
    model, info = model_class.from_pretrained(hf_dir, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def empty_model(hf_dir: str | Path) -> Any:
    """The model of a directory as a run builds it: adapted class, float32, from meta, every value NaN."""
    model = meta_model(hf_dir).to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
    return model


def meta_model(hf_dir: str | Path) -> Any:
    """The model of a directory without storage."""
    import transformers

    from mindspeed_mm.models.common.base_model import adapt_class

    model_class: Any = adapt_class(getattr(transformers, _architecture(hf_dir)))
    with torch.device("meta"):
        return model_class._from_config(transformers.AutoConfig.from_pretrained(hf_dir), dtype=torch.float32)


def _architecture(hf_dir: str | Path) -> str:
    return json.loads((Path(hf_dir) / "config.json").read_text(encoding="utf-8"))["architectures"][0]


@functools.cache
def _root() -> Any:
    return tempfile.TemporaryDirectory(prefix="tiny-families-")


@functools.cache
def _built(family: str, dtype: torch.dtype, max_shard_size: int | None) -> Path:
    maker, tie = _MAKERS[family]
    folder = Path(_root().name) / f"{family}-{dtype}-{max_shard_size}"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = maker(tie)
        for parameter in model.parameters():
            parameter.normal_()
        model = model.to(dtype)
    largest = max_shard_size or 1_000_000_000
    model.save_pretrained(folder, max_shard_size=largest)
    if family in _HUB_LAYOUT:
        tensors: dict[str, torch.Tensor] = {}
        for file in folder.glob("model*"):
            tensors |= load_file(file) if file.suffix == ".safetensors" else {}
            file.unlink()
        save_torch_state_dict(_HUB_LAYOUT[family](tensors), folder, max_shard_size=largest)
    return folder


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    """What the safetensors library finds in a directory's files, each name once."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        content = load_file(file)
        assert not content.keys() & found.keys()
        found |= content
    return found


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same names, dtypes and values, bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
