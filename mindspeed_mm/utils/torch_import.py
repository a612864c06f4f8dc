"""Import torch, beside transformers where both are needed; a torch_npu that does not load is told in one sentence."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from pathlib import Path
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


def import_torch_and_transformers() -> ModuleType:
    """Import transformers and torch in less time than one after the other, and return torch.

    A large part of torch's import is the loading of its libraries, which needs no Python: a thread does it while this
    one imports what is Python alone, the list of transformers' models and sympy, which both of them import later. It
    needs a second core to gain anything.

    Raises:
        MMError: as `import_torch`, and as early where torch_npu is installed.
    """
    if "torch" in sys.modules or loads_torch_npu():
        return import_torch()
    importlib.import_module("transformers")  # its extension modules would wait for the loader, which the thread holds
    loading = threading.Thread(target=_load_libraries, name="load-libtorch", daemon=True)
    loading.start()
    importlib.import_module("transformers.models")
    if importlib.util.find_spec("sympy") is not None:
        importlib.import_module("sympy")
    loading.join()  # no process is forked while libraries are loaded
    return import_torch()


def _load_libraries() -> None:
    """Load torch's libraries without Python's lock, in torch's own order; the import of torch reports what fails.

    If the first one finds no library of CUDA, nothing else is loaded: torch then chooses among several copies.
    """
    spec = importlib.util.find_spec("torch")
    if sys.platform != "linux" or spec is None or not spec.submodule_search_locations:
        return
    load = ctypes.CDLL(None).dlopen  # the call of a foreign function, unlike ctypes.CDLL(path), releases the lock
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    folder = Path(spec.submodule_search_locations[0], "lib")
    libraries = {"libtorch_global_deps.so": os.RTLD_GLOBAL}
    libraries |= dict.fromkeys(("libtorch_cpu.so", "libtorch_cuda.so"), os.RTLD_LOCAL)
    for name, scope in libraries.items():
        if (folder / name).is_file() and load(os.fsencode(folder / name), os.RTLD_NOW | scope) is None:
            return
