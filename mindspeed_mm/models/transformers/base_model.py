"""The published import path of FSDP2Mixin and WeightInitMixin."""

from mindspeed_mm.models.common.base_model import FSDP2Mixin, WeightInitMixin

__all__ = ["FSDP2Mixin", "WeightInitMixin"]
