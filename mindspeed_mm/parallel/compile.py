"""Regional compile: the computation of each block becomes one function of torch.compile, which all like blocks share.

The `forward` method of the module is replaced, so that state-dict keys stay; the hooks that gather its parameters stay
outside, as do recompute, offload and chunks, which call the compiled function. Sizes of inputs are symbols: rows of any
length share a function, but for sizes of 1 and of 0, which torch.compile takes for constants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch._dynamo
import torch.fx.experimental._config
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from mindspeed_mm import accelerator
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import info_rank0, notice

#: kinds of inputs that are compiled for; all blocks of transformers share the code object that they are counted for
MOST_KINDS = 64


@runtime_checkable
class EntersGraph(Protocol):
    """An argument of blocks that holds more than tensors."""

    def enter_graph(self, ready: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Make `ready` the tensors that a compiled block reads of it; return whether the block may be compiled."""


def apply_compile(root: nn.Module, modules: Mapping[str, nn.Module], backend: str, where: str) -> None:
    """Compile the computation of each of `modules` for training; `forward` is replaced.

    Args:
        root: the model; in evaluation mode, and in its first pass, its modules compute as they are.
        modules: path → module, not wrapped yet.
        backend: of torch.compile.
        where: file and key, for messages.

    Raises:
        ConfigError: the backend's compiler is missing.
    """
    if backend == "inductor":
        why = accelerator.current().why_no_inductor()
        if why is not None:
            raise ConfigError(f"{where}: {why}; install it, or leave the key out")
    _configure()
    passes = _Passes(root)
    for path, module in modules.items():
        compiled = torch.compile(module.forward, backend=backend)
        module.forward = _in_training(passes, path, module.forward, compiled)  # type: ignore[method-assign]
    info_rank0(f"{where}: {len(modules)} modules are compiled as they are first called{_cache_of(backend)}")


def _cache_of(backend: str) -> str:
    if backend != "inductor":
        return f", by {backend}"
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return f"; kernels are kept for later runs, and shared by ranks, in {cache_dir()} (TORCHINDUCTOR_CACHE_DIR)"


def _configure() -> None:
    """Set what torch.compile has for a whole process alone."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_KINDS)
    config.fail_on_recompile_limit_hit = True  # otherwise it would go on without a function, and say so once
    torch.fx.experimental._config.use_duck_shape = False  # sizes that are equal by chance stay two sizes


class _Passes:
    """Says which passes of a model are compiled: those in training mode, but for the first one.

    The first one has hooks that look at what is called, and are gone after it.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root, self._count = root, 0
        root.register_forward_pre_hook(self._begin)

    def _begin(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        self._count += root.training

    @property
    def is_compiled(self) -> bool:
        """Whether the current pass is; a recompute belongs to the last one that has begun."""
        return self._root.training and self._count > 1


def _in_training(
    passes: _Passes, path: str, forward: Callable[..., Any], compiled: Callable[..., Any]
) -> Callable[..., Any]:
    is_off = False

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_off
        if is_off or not passes.is_compiled:
            return forward(*args, **kwargs)
        if not all(value.enter_graph(_entering) for value in kwargs.values() if isinstance(value, EntersGraph)):
            return forward(*args, **kwargs)
        try:
            return compiled(*_entering(args), **{name: _entering(value) for name, value in kwargs.items()})
        except FailOnRecompileLimitHit:
            is_off = True
            notice(
                f"'{path}' and others like it have been compiled for {MOST_KINDS} kinds of inputs, and there are more: "
                "it computes uncompiled from now on; TORCH_LOGS=recompiles shows what differs"
            )
            return forward(*args, **kwargs)

    return run


def _entering(value: Any) -> Any:
    """Return tensors of an argument as such that are no views: a function is compiled for sizes of their base, too.

    Their sizes are marked as symbols, but for the last one of floating-point tensors: that of heads or hidden states.
    It becomes a symbol, too, if another call has another one.
    """
    if isinstance(value, torch.Tensor):
        if value._is_view():
            value = _Whole.apply(value) if value.requires_grad else value.detach()
        symbols = value.dim() - (value.dim() > 1 and value.is_floating_point())
        torch._dynamo.maybe_mark_dynamic(value, list(range(symbols)))
        return value
    if type(value) in (tuple, list):
        return type(value)(map(_entering, value))
    return value


class _Whole(torch.autograd.Function):
    """The same memory, and gradient, as a tensor that is no view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
