"""The published import path of SoRAModel."""

from mindspeed_mm.models.generation.sora_model import SoRAModel

__all__ = ["SoRAModel"]
