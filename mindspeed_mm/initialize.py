"""From a command line to a described, prepared run; and from an error to a sentence."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.environment import harmful_settings
from mindspeed_mm.backends.fsdp2 import FSDP2Backend
from mindspeed_mm.backends.protocol import Backend
from mindspeed_mm.configs.arguments import REQUIRED, parse_args, validate_args
from mindspeed_mm.configs.config import merge_mm_args
from mindspeed_mm.configs.flags.spec import road_of
from mindspeed_mm.configs.global_args import set_args
from mindspeed_mm.configs.other_scripts import FileKind
from mindspeed_mm.configs.tools_config import ToolsConfig
from mindspeed_mm.utils.errors import MMError, kind_of
from mindspeed_mm.utils.extras import missing_library_as_sentence, require_extra
from mindspeed_mm.utils.first_failure import claim, tell, tell_after, tell_torchrun
from mindspeed_mm.utils.interrupted import SENTENCE
from mindspeed_mm.utils.launch import this_launch
from mindspeed_mm.utils.log import notice
from mindspeed_mm.utils.versions import check_versions


def describe_run(
    argv: Sequence[str] | None = None,
    *,
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
    own_model: bool = False,
    own_data: bool = False,
    model_kind: FileKind = "language",
    data_kind: FileKind = "language",
    roads: Sequence[str] = ("fsdp2",),
) -> Any:
    """Read flags and files into one description, checked against the schemas, and make it `get_args()`'s.

    Args:
        argv: None: this process's.
        own_model, own_data: the script brings a model, or data, of its own: --mm-model, --mm-data may be absent, and
            the files may hold keys of their own.
        model_kind, data_kind: which schema the files of this project's own script follow.
        roads: backends that the script can train with: "ptd", "fsdp2".

    Returns:
        the Namespace; `args.mm` holds the files, `args.tools` tools.json typed.

    Raises:
        ConfigError: anything in them that can't be honoured.
    """
    check_versions()
    optional = {"mm_model": own_model, "mm_data": own_data}
    args = parse_args(
        argv,
        extra_args_provider=extra_args_provider,
        args_defaults=args_defaults,
        required=[name for name in REQUIRED if not optional.get(name)],
        roads=roads,
        own_model=own_model,
    )
    if model_kind == "generation" and not args.use_torch_fsdp2:
        args.use_torch_fsdp2 = True
        notice("--use-torch-fsdp2 is implied: this script trains with FSDP2 only")
    merge_mm_args(args, own_model=own_model, own_data=own_data, model_kind=model_kind, data_kind=data_kind)
    args.tools = ToolsConfig.from_dict(getattr(args.mm, "tool", None) or {})
    validate_args(args, this_launch().world_size)
    _require_extras(args, model_kind)
    set_args(args)
    return args


def _require_extras(args: Any, model_kind: FileKind) -> None:
    """Refuse a run whose flags ask for packages that aren't installed."""
    if not args.use_torch_fsdp2:
        require_extra("megatron", "the Megatron backend, which trains without --use-torch-fsdp2,")
    if model_kind == "generation":
        require_extra("generation", "a model that makes images or videos")
    if args.tensorboard_dir:
        require_extra("tensorboard", "--tensorboard-dir")


def prepare_process(args: Any) -> None:
    """Say which settings of the environment hurt, seed, and set the switches that hold for the whole process."""
    for sentence in harmful_settings(
        accelerator.current().name, road=road_of(args), tensor_parallel_size=args.tensor_model_parallel_size
    ):
        notice(sentence)
    random.seed(args.seed)
    np.random.seed(args.seed % 2**32)
    accelerator.current().manual_seed(args.seed)
    if args.deterministic_mode or args.use_deter_comp:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        torch.use_deterministic_algorithms(True)


def create_backend(args: Any) -> Backend:
    """The backend that the flags ask for."""
    if args.use_torch_fsdp2:
        return FSDP2Backend()
    accelerator.prepare_megatron()  # before megatron is imported for the first time
    from mindspeed_mm.backends.ptd import PTDBackend

    return PTDBackend()


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Turn what ends the run into words from one rank, and the exit status.

    An MMError is printed without a traceback, left to the launcher's summary, and ends the process with status 1; a
    signal before the first step, or Ctrl-C, with one line and 128 + its number. Any other exception goes on as it is,
    unless another rank of this machine has failed before: one line then says what happened here, as it probably
    followed from that.
    """
    try:
        with missing_library_as_sentence():
            yield
    except MMError as error:
        _outlive_peers()
        tell(f"{kind_of(error)}: {error}")
        # peers may be waiting in a collective for this rank: leave at once, the launcher ends them
        os._exit(1)
    except KeyboardInterrupt as error:
        number = getattr(error, "number", signal.SIGINT)
        sentence = str(error) or SENTENCE
        sys.stdout.flush()
        if claim(sentence) is None:
            print(f"\n{sentence}", file=sys.stderr, flush=True)
        os._exit(128 + number)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        first = claim(text)
        if first is None:
            tell_torchrun(text)
            raise
        tell_after(first, text)
        time.sleep(1)  # torchrun ends the other ranks when this one is gone, and the first one may still be printing
        sys.exit(1)


def _outlive_peers() -> None:
    """Let this process finish its sentence: torchrun ends it as soon as another rank has failed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
