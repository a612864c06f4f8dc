"""Building models on meta whose constructors initialise their parameters, with initialisation replayed later.

Libraries such as diffusers have no function that initialises a built model: constructors do it, parameter by parameter.
So the operations of a constructor on each parameter are recorded while it runs, and replayed on real storage later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.seeds import seeded

_RECIPES = "_constructor_recipes"


@dataclass
class ParameterRecipe:
    """A recording of how a constructor fills a parameter.

    Attributes:
        value: the parameter's value when it was registered; None: it had none.
        operations: later in-place operations, in order; each takes the tensor to fill.
    """

    value: torch.Tensor | None = None
    operations: list[Callable[[torch.Tensor], None]] = field(default_factory=list)

    def fill(self, target: torch.Tensor) -> None:
        """Fill `target`, a tensor of the parameter's shape, with random values of the host's default generator."""
        if self.value is not None:
            target.copy_(self.value)
        for operation in self.operations:
            operation(target)


def build_on_meta(model_class: Any, config: Mapping[str, Any], seed: int = 1234) -> Any:
    """Build a model with parameters on meta, and with buffers and other tensors in host memory.

    Tables that the constructor computes (rotary angles, position embeddings) thus have their values, and parameters
    have recipes for `initialize_from_recipes`. Parameters take no memory, except small ones whose value is recorded.

    Args:
        model_class: class of a diffusers model, adapted or not; any class with `from_config(dict)` will do.
        config: content of the model's config.json.
        seed: seed of values that constructors draw before they register a parameter (scale_shift_table).
    """
    with seeded(seed, "constructor"), torch.device("cpu"), _Recorder():
        model = model_class.from_config(dict(config))
    return model


def has_recipes(module: nn.Module) -> bool:
    """Whether `module` was built by `build_on_meta`."""
    return hasattr(module, _RECIPES)


@torch.no_grad()
def initialize_from_recipes(module: nn.Module) -> None:
    """Fill `module`'s own parameters as its constructor would have; parameters without a recipe are left alone."""
    recipes: dict[str, ParameterRecipe] = getattr(module, _RECIPES, {})
    for name, param in module._parameters.items():
        if param is not None and name in recipes:
            recipes[name].fill(param)


class _Recorder(TorchDispatchMode):
    """Moves each parameter to meta when it is registered, and records the operations on it."""

    def __init__(self) -> None:
        super().__init__()
        # by storage, since `param.data` and slices are other tensors; keeping the parameter keeps its storage alive
        self._known: dict[int, tuple[nn.Parameter, ParameterRecipe]] = {}
        self._thread = threading.get_ident()

    def __enter__(self) -> Any:
        self._hook = register_module_parameter_registration_hook(self._register)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _EMPTY and not result.is_meta:
            _mark_empty(result)
        elif func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            known = self._known.get(_storage(args[0]))
            if known is not None:
                known[1].operations.append(_operation(func, args, kwargs or {}))
        return result

    def _register(self, module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or threading.get_ident() != self._thread:
            return None
        if not param.is_meta:
            real = param.detach()
            param = nn.Parameter(torch.empty_like(real, device="meta"), requires_grad=param.requires_grad)
            self._known[_storage(param)] = (param, ParameterRecipe(None if _is_marked(real) else real))
        known = self._known.get(_storage(param))
        if known is not None:
            module.__dict__.setdefault(_RECIPES, {})[name] = known[1]
        return param


_EMPTY = {torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.empty_like, torch.ops.aten.new_empty}


def _mark_empty(tensor: torch.Tensor) -> None:
    """Mark uninitialised memory by a first element that is NaN; the rest of a large tensor is never touched."""
    if tensor.is_floating_point() and tensor.numel():
        tensor.as_strided((1,), (1,)).fill_(torch.nan)


def _is_marked(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and bool(tensor.as_strided((1,), (1,)).isnan())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[torch.Tensor], None]:
    changed, *others = args
    if any(isinstance(a, torch.Tensor) and a.is_meta for a in tree_iter((others, kwargs))):

        def refuse(target: torch.Tensor) -> None:
            raise ConfigError(
                "the model's constructor fills a parameter from another one, which can't be done without weights; "
                "start from pretrained weights"
            )

        return refuse
    size, stride, offset = changed.size(), changed.stride(), changed.storage_offset()

    def repeat(target: torch.Tensor) -> None:
        func(target.as_strided(size, stride, offset), *others, **kwargs)

    return repeat
