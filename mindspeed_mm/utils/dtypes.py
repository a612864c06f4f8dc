"""Names of dtypes, as flags and files write them."""

from __future__ import annotations

import torch

from mindspeed_mm.utils.errors import ConfigError, did_you_mean

TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
}


def to_torch_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """Return the torch dtype that `name` (bf16, fp16, fp32 and their long forms) means; None stays None."""
    if name is None or isinstance(name, torch.dtype):
        return name
    short = str(name).strip().lower().removeprefix("torch.")
    if short not in TORCH_DTYPES:
        raise ConfigError(f"dtype '{name}' is unknown; expected bf16, fp16 or fp32{did_you_mean(short, TORCH_DTYPES)}")
    return TORCH_DTYPES[short]
