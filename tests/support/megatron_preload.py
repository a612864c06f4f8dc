"""Import what runs on the Megatron backend import, for the server that their workers are forked from, and no other."""

from mindspeed_mm import accelerator

accelerator.prepare_megatron()

import mindspeed_mm.backends.ptd  # noqa: E402
import mindspeed_mm.models.megatron.vlm_model  # noqa: E402, F401
