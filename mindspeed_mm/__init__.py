"""mindspeed_mm: a training framework for multimodal models (understanding, generation, omni).

Importing it is cheap (no torch). It makes `from megatron.training import get_args` answer (see
`configs/megatron_standin.py`), so that published entry scripts work where Megatron-LM is absent, and lets the check of
model.json find the families of models. Where torch_npu is installed, torch is imported at once, so that a missing CANN
is told in a sentence before anything else trips over it.
"""

import importlib.util

from mindspeed_mm.configs import megatron_standin
from mindspeed_mm.configs.family_structure import connect_families
from mindspeed_mm.models.common.families import find_family_structure

__version__ = "0.1.0"

megatron_standin.install()
connect_families(find_family_structure)

if importlib.util.find_spec("torch_npu") is not None:
    from mindspeed_mm.utils.torch_import import import_torch

    import_torch()
