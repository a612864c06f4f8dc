"""Import torch, and describe the failure of torch_npu without CANN or with another torch in one sentence."""

from __future__ import annotations

import importlib
from types import ModuleType

from mindspeed_mm.utils.errors import MMError
from mindspeed_mm.utils.versions import built_for_another_torch, loads_torch_npu


def import_torch() -> ModuleType:
    """Import and return torch.

    torch loads installed device backends by itself, and torch_npu raises there when the Ascend toolkit (CANN)
    is not on the library path, so that plain `import torch` fails. With another release of torch than its own it
    may end the process without a message, so this is checked before.

    Raises:
        MMError: torch_npu is installed but can't be loaded; states what to install, source, set or uninstall.
    """
    elsewhere = "to train on CPU or CUDA set TORCH_DEVICE_BACKEND_AUTOLOAD=0 or run `pip uninstall torch_npu`."
    if not loads_torch_npu():
        return importlib.import_module("torch")
    fault = built_for_another_torch("torch_npu")
    if fault is not None:
        raise MMError(f"{fault}; {elsewhere}")
    try:
        return importlib.import_module("torch")
    except Exception as error:
        cause = error.__cause__ or error
        need = (
            "torch_npu needs a torch that is built for no other accelerator: on x86_64 install PyTorch's CPU build of "
            "the same release (see constraints-npu.txt)"
            if "Two accelerators" in str(cause)
            else "torch_npu needs the Ascend toolkit (CANN): on an NPU machine run "
            "`source /usr/local/Ascend/ascend-toolkit/set_env.sh` first"
        )
        first_line = str(cause).splitlines()[0] if str(cause) else ""
        raise MMError(
            f"import torch failed while it loaded torch_npu ({type(cause).__name__}: {first_line}). {need}; {elsewhere}"
        ) from error
