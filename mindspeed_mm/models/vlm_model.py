"""The published import path of VLModel. Imports megatron."""

from mindspeed_mm.models.megatron.vlm_model import VLModel

__all__ = ["VLModel"]
