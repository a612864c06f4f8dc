"""Import torch, and turn torch_npu's failure without CANN into a sentence."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

from mindspeed_mm.utils.errors import MMError


def _has_torch_npu() -> bool:
    try:
        importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def import_torch() -> ModuleType:
    """Import and return torch.

    torch loads installed device backends by itself, and torch_npu raises there when the Ascend toolkit (CANN)
    is not on the library path, so that plain `import torch` fails.

    Raises:
        MMError: torch_npu is installed but can't be loaded; says what to source, set or uninstall.
    """
    try:
        return importlib.import_module("torch")
    except Exception as error:
        if not _has_torch_npu():
            raise
        cause = error.__cause__ or error
        raise MMError(
            f"import torch failed while it loaded torch_npu ({type(cause).__name__}: {cause}). torch_npu needs the "
            "Ascend toolkit (CANN): on an NPU machine run `source /usr/local/Ascend/ascend-toolkit/set_env.sh` first; "
            "to train on CPU or CUDA set TORCH_DEVICE_BACKEND_AUTOLOAD=0 or run `pip uninstall torch_npu`."
        ) from error
