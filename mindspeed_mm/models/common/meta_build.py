"""A model without storage for its parameters that remembers how its constructor would have filled them.

Libraries such as diffusers have no function that initialises a built model: constructors do it, parameter by parameter.
So what a constructor does to each parameter is written down while it runs, and done again on the real tensor later.
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
    """How a constructor fills a parameter.

    Attributes:
        value: what it held when it was registered; None: nothing.
        operations: what was done to it afterwards, in order: each takes the tensor to fill.
    """

    value: torch.Tensor | None = None
    operations: list[Callable[[torch.Tensor], None]] = field(default_factory=list)

    def fill(self, target: torch.Tensor) -> None:
        """Fill `target`, of the parameter's shape; random values come from the default generator of the host."""
        if self.value is not None:
            target.copy_(self.value)
        for operation in self.operations:
            operation(target)


def build_on_meta(model_class: Any, config: Mapping[str, Any], seed: int = 1234) -> Any:
    """Build a model whose parameters are on meta, and whose buffers and other tensors are real, on the host.

    Tables that the constructor computes (rotary angles, position embeddings) are thus what it made of them, and
    parameters have recipes for `initialize_from_recipes`. A parameter costs no memory, but for small ones that a module
    holds a value of.

    Args:
        model_class: a diffusers model's, adapted or not: anything with `from_config(dict)`.
        config: content of its config.json.
        seed: of the values that constructors draw for parameters that they hold directly (scale_shift_table).
    """
    with seeded(seed, "constructor"), torch.device("cpu"), _Recorder():
        model = model_class.from_config(dict(config))
    return model


def has_recipes(module: nn.Module) -> bool:
    """Whether `module` was built by `build_on_meta`."""
    return hasattr(module, _RECIPES)


@torch.no_grad()
def initialize_from_recipes(module: nn.Module) -> None:
    """Fill the parameters that are `module`'s own as its constructor would have; those without recipe are left."""
    recipes: dict[str, ParameterRecipe] = getattr(module, _RECIPES, {})
    for name, param in module._parameters.items():
        if param is not None and name in recipes:
            recipes[name].fill(param)


class _Recorder(TorchDispatchMode):
    """Puts each parameter on meta as it is registered, and records what is done to it."""

    def __init__(self) -> None:
        super().__init__()
        # by storage, as `param.data` and slices are other tensors; the parameter is kept, so its storage stays its own
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
    """Recognise memory without values by a first element that is not a number: large ones are never touched."""
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
