"""Parts and tower of Qwen2-VL, which has no windows."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.models.transformers.qwen2_5_vl.grids import axial_inputs
from mindspeed_mm.models.transformers.qwen2_5_vl.traits import TRAITS as QWEN2_5_VL
from mindspeed_mm.models.transformers.qwen2_5_vl.traits import grid_tower

TRAITS = replace(QWEN2_5_VL, towers=(grid_tower(axial_inputs),))
