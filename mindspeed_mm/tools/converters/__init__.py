"""The converters of `mm-convert`, by name: the generic one, and those of published commands, which are names of it."""

from mindspeed_mm.tools.converters.dcp import (
    ExpertMergeDcpConverter,
    Mistral3Converter,
    Qwen3VLConverter,
    Qwen35Converter,
)
from mindspeed_mm.tools.converters.diffusers import CogVideoConverter, HunyuanVideoConverter, WanConverter
from mindspeed_mm.tools.converters.generic import GenericDCPConverter
from mindspeed_mm.tools.converters.layouts import (
    GlmConverter,
    InternVLConverter,
    Qwen2_5_OmniConverter,
    Qwen2_5_VLConverter,
    Qwen2VLConverter,
    Qwen3VLMegatronConverter,
)

_DCP = ("hf_to_dcp", "dcp_to_hf")
_LORA = ("lora_hf_to_dcp", "lora_dcp_to_hf")
_LORA_MERGE = (*_LORA, "merge_mm_lora_dcp_weight_to_base_hf")
_LAYOUTS = ("hf_to_mm", "mm_to_hf", "resplit")
_DIFFUSERS = ("hf_to_mm", "mm_to_hf", "mm_to_dcp", "resplit", "lora_hf_to_mm", "merge_lora_to_base")

#: converter → its directions
CONVERTERS: dict[type, tuple[str, ...]] = {
    GenericDCPConverter: (*_DCP, "merge_lora", *_LORA),
    **dict.fromkeys((ExpertMergeDcpConverter, Qwen35Converter), _DCP),
    **dict.fromkeys((Mistral3Converter, Qwen3VLConverter), (*_DCP, *_LORA_MERGE)),
    **dict.fromkeys(
        (GlmConverter, InternVLConverter, Qwen2VLConverter, Qwen2_5_OmniConverter, Qwen3VLMegatronConverter), _LAYOUTS
    ),
    Qwen2_5_VLConverter: (*_LAYOUTS, "hf_to_mm_ldt", "lora_hf_to_mm", "lora_mm_to_hf"),
    **dict.fromkeys((CogVideoConverter, HunyuanVideoConverter, WanConverter), _DIFFUSERS),
}
