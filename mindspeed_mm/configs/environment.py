"""Environment variables of published launch scripts, and our own: what each is for, and which have no effect here.

Values that slow a run down are listed in `accelerator/environment.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from mindspeed_mm.configs.scalars import is_null_word, read_bool
from mindspeed_mm.utils.errors import nearest_names
from mindspeed_mm.utils.log import notice


class Variable(NamedTuple):
    """One variable.

    Attributes:
        meaning: what comes of it.
        no_effect: why it has none here, for those that published scripts set to change the training; None: it has.
    """

    meaning: str
    no_effect: str | None = None


#: set for the processes that `mindspeed-mm train` starts by itself
STARTER = "MM_STARTED_BY"
#: set by `mindspeed-mm train`, to this value, without --traceback
TRACEBACKS, TO_FILES = "MM_TRACEBACKS", "files"
_LAUNCHER = "set by torchrun"
_ASCEND = "read by Ascend's own packages; nothing here depends on it"
_SNAPSHOT = "memory snapshots are described by tools.json's memory_profile"

VARIABLES: Mapping[str, Variable] = {
    "MM_DEVICE": Variable("cpu, cuda or npu: the device to train on; absent = the best that is there"),
    "MM_DEVICE_PEAK_TFLOPS": Variable("peak of one device in 10^12 operations a second, for MFU"),
    "MM_LOG_LEVEL": Variable("level of log lines: DEBUG, INFO, WARNING, ERROR; absent = INFO"),
    STARTER: Variable(
        "set by mindspeed-mm train: --log-format auto then writes for people; absent = the published line"
    ),
    TRACEBACKS: Variable("files: an exception is one sentence, its traceback a file; mindspeed-mm train sets it"),
    "MM_API_KEY": Variable("mindspeed-mm serve: the key that requests need; --api-key-file precedes it"),
    "MM_SERVE_GUARD": Variable("set by mindspeed-mm serve for the vLLM that it starts"),
    "MM_ROAD": Variable("fsdp2 or ptd: the backend that examples/env_config.sh sets the environment for"),
    "IMAGE_PLACEHOLDER": Variable("what stands for an image in a row's text; absent = <image>"),
    "VIDEO_PLACEHOLDER": Variable("what stands for a video in a row's text; absent = <video>"),
    "AUDIO_PLACEHOLDER": Variable("what stands for a sound in a row's text; absent = <audio>"),
    "VP_SIZE": Variable("Megatron backend: the same as --virtual-pipeline-model-parallel-size"),
    "CUDA_DEVICE_MAX_CONNECTIONS": Variable(
        "CUDA: 1 for tensor parallelism, anything else for FSDP2; a notice is logged otherwise"
    ),
    "TOKENIZERS_PARALLELISM": Variable("false = tokenizers use one thread, which loader workers want"),
    "PYTHONUNBUFFERED": Variable("read by Python: output isn't buffered"),
    "RANK": Variable(_LAUNCHER),
    "WORLD_SIZE": Variable(_LAUNCHER),
    "LOCAL_RANK": Variable(_LAUNCHER),
    "MASTER_ADDR": Variable(_LAUNCHER),
    "MASTER_PORT": Variable(_LAUNCHER),
    "TORCHELASTIC_RESTART_COUNT": Variable(f"{_LAUNCHER}: a restart goes on from its launch's last checkpoint"),
    "TORCHELASTIC_RUN_ID": Variable(f"{_LAUNCHER}: an attempt takes the lock of the one before without a word"),
    "GLOO_SOCKET_IFNAME": Variable("network interface of gloo"),
    "HCCL_SOCKET_IFNAME": Variable("network interface of hccl"),
    "TP_SOCKET_IFNAME": Variable("network interface of torch's own transport"),
    "HCCL_CONNECT_TIMEOUT": Variable("seconds that hccl waits for other ranks at the start"),
    "HCCL_EXEC_TIMEOUT": Variable("seconds that one of hccl's collectives may take"),
    "HCCL_BUFFSIZE": Variable("megabytes of hccl's buffers"),
    "HCCL_DETERMINISTIC": Variable("true = hccl sums in a fixed order; --use-deter-comp sets it"),
    "PYTORCH_NPU_ALLOC_CONF": Variable("settings of the NPU's memory allocator, such as expandable_segments:True"),
    "ACLNN_CACHE_LIMIT": Variable(_ASCEND),
    "ASCEND_GLOBAL_LOG_LEVEL": Variable(_ASCEND),
    "ASCEND_LAUNCH_BLOCKING": Variable(_ASCEND),
    "ASCEND_RT_VISIBLE_DEVICES": Variable(_ASCEND),
    "ASCEND_SLOG_PRINT_TO_STDOUT": Variable(_ASCEND),
    "CLOSE_MATMUL_K_SHIFT": Variable(_ASCEND),
    "COMBINED_ENABLE": Variable(_ASCEND),
    "CPU_AFFINITY_CONF": Variable(_ASCEND),
    "MULTI_STREAM_MEMORY_REUSE": Variable(_ASCEND),
    "NPU_ASD_ENABLE": Variable(_ASCEND),
    "TASK_QUEUE_ENABLE": Variable(_ASCEND),
    "NON_MEGATRON": Variable("what launches of trainer.py set; a run on FSDP2 never imports megatron anyway"),
    "ENABLE_GC_THRESHOLD": Variable("", "write --manual-gc, which collects on all ranks at once"),
    "HF_SAVE_WAIT_MODE": Variable("", "ranks don't wait for each other by sleeping while a model is exported"),
    "OOM_SNAPSHOT_ENABLE": Variable("", _SNAPSHOT),
    "OOM_SNAPSHOT_PATH": Variable("", _SNAPSHOT),
}

#: names that published scripts give to shell variables, which may be exported, and prefixes of other commands'
_SCRIPTS_OWN = ("MM_DATA", "MM_MODEL", "MM_TOOL", "MM_MODEL_LOAD_PATH", "MM_TOOL_PATH", "MM_ARGS", "MM_ROOT")
_OTHER_COMMANDS = ("MM_CONVERT_",)


def log_environment_notices(environment: Mapping[str, str] | None = None) -> None:
    """Log which variables have no effect here, and which names of ours are perhaps misspelt.

    Args:
        environment: None: this process's.
    """
    found = os.environ if environment is None else environment
    for name, variable in VARIABLES.items():
        if variable.no_effect and _is_on(found.get(name)):
            notice(f"the variable {name} has no effect here: {variable.no_effect}")
    ours = [name for name in VARIABLES if name.startswith("MM_")]
    for name in sorted(found):
        if not name.startswith("MM_") or name in (*ours, *_SCRIPTS_OWN) or name.startswith(_OTHER_COMMANDS):
            continue
        near = nearest_names(name, ours, limit=1)
        if near:
            notice(f"the variable {name} is unknown; did you mean {near[0]}?")


def _is_on(word: str | None) -> bool:
    if not word or is_null_word(word):
        return False
    try:
        return read_bool(word)
    except ValueError:
        return True
