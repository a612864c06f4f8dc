"""From a described run to a prepared process and its backend."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.environment import harmful_settings
from mindspeed_mm.backends.fsdp2 import FSDP2Backend
from mindspeed_mm.backends.protocol import Backend
from mindspeed_mm.configs.run import Run
from mindspeed_mm.utils.log import notice


def prepare_process(run: Run) -> None:
    """Log harmful settings of the environment, seed all generators, and set the switches of the whole process."""
    for sentence in harmful_settings(
        accelerator.current().name,
        backend=run.parallel.backend,
        tensor_parallel_size=run.parallel.tensor_model_parallel_size,
    ):
        notice(sentence)
    seed = run.process.seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    accelerator.current().manual_seed(seed)
    if run.process.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        torch.use_deterministic_algorithms(True)
    if run.precision.allow_tf32:
        accelerator.current().allow_tf32()


def create_backend(run: Run) -> Backend:
    """Build the backend of a run."""
    if run.uses_fsdp2:
        return FSDP2Backend()
    accelerator.prepare_megatron()  # before megatron is imported for the first time
    from mindspeed_mm.backends.ptd import PTDBackend

    return PTDBackend()
