"""mindspeed_mm: a training framework for multimodal models (understanding, generation, omni).

Importing it is cheap (no torch): it only makes `from megatron.training import get_args` answer
(see `configs/megatron_standin.py`), so that published entry scripts work where Megatron-LM is absent.
"""

from mindspeed_mm.configs import megatron_standin

__version__ = "0.1.0"

megatron_standin.install()
