"""The thinker of Qwen3-Omni in a directory of its own, as transformers saves it."""

from __future__ import annotations

from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.qwen3_omni_moe import Qwen3OmniMoeThinker

ModelHub.register("qwen3_omni_moe_thinker", Qwen3OmniMoeThinker)
