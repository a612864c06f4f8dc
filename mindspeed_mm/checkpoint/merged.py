"""Weights with adapters added: expressions over the tensors of a base model and of adapters, read one by one."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mindspeed_mm.checkpoint.adapter_files import AdapterFiles
from mindspeed_mm.checkpoint.lazy import LazyTensor, Node, computed
from mindspeed_mm.checkpoint.sources import WeightSource, shown
from mindspeed_mm.checkpoint.tensors import persistent_tensors
from mindspeed_mm.checkpoint.weights import plan_weights, refuse_misfits
from mindspeed_mm.utils.adapter_names import is_adapter, stored_name
from mindspeed_mm.utils.errors import CheckpointError

_Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_TENSOR = re.compile(r"(?:^|\.)(lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))(\.weight)?$")
#: setting of adapter_config.json without a meaning here → its value when it is off
_OFF: Mapping[str, tuple[Any, ...]] = {
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "megatron_config": (None,),
}


@dataclass
class _Adapter:
    """An adapter's tensors by kind (lora_A …), and whether experts' weights are [experts, in, out]."""

    parts: dict[str, LazyTensor]
    is_transposed: bool = False


class MergedWeights:
    """A base model's weights with adapters added, under the names of the model."""

    in_hub_layout = False

    def __init__(self, path: Path, values: Mapping[str, Node]) -> None:
        self.path = path
        self._values = values

    def tensors(self) -> dict[str, LazyTensor]:
        """See WeightSource."""
        return {name: LazyTensor(node) for name, node in self._values.items()}


def merge_weights(
    model: nn.Module, base: WeightSource, adapters: AdapterFiles, *, scaling: float | None = None
) -> MergedWeights:
    """Add adapters to a base model's weights; a weight is rounded to the base's dtype.

    Source: `merge` of PEFT's LoRA layers: W + s·B·A, computed in float32, and of DoRA m · (W + s·B·A) / ‖W + s·B·A‖.

    Args:
        model: the base model; may be on the meta device.
        scaling: s, if the adapters' settings don't say it.

    Raises:
        CheckpointError: the base's weights don't belong to the model or the adapters not to its layers; or the
            adapters have something that merging doesn't know.
    """
    plan = plan_weights(model, base)
    refuse_misfits(plan, model, base, strict=True)
    refuse_unknown_settings(adapters)
    scaling = adapters.scaling if scaling is None else scaling
    values = dict(plan.values)
    aliases = _first_names(model)
    whole, layers = _sorted(model, adapters)
    for name, tensor in whole.items():
        place = aliases[name]
        if tuple(tensor.shape) != values[place].shape:
            raise CheckpointError(
                f"'{adapters.path}': {name} has shape {tuple(tensor.shape)}, the base model's {values[place].shape}"
            )
        values[place] = tensor.node
    for name, adapter in layers.items():
        parameter = name if name in aliases else f"{name}.weight"
        place = aliases[parameter]
        factor = _scaling(adapters.config, parameter.rpartition(".")[0], adapter) if scaling is None else scaling
        values[place] = _merged(values[place], adapter, factor, f"'{adapters.path}': {name}").node
    return MergedWeights(base.path, values)


def refuse_unknown_settings(adapters: AdapterFiles) -> None:
    """Raise if adapters have settings that change what they mean, and that are not there.

    Raises:
        CheckpointError: the message names the setting.
    """
    for key, off in _OFF.items():
        if (value := adapters.config.get(key)) not in off:
            raise CheckpointError(f"'{adapters.path}': adapters with {key} {value!r} can't be merged here, but by PEFT")


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return each name of a parameter or buffer, and the first name of the same tensor."""
    first: dict[int, str] = {}
    return {n: first.setdefault(id(t), n) for n, t in persistent_tensors(model, tied_once=False).items()}


def _sorted(model: nn.Module, adapters: AdapterFiles) -> tuple[dict[str, LazyTensor], dict[str, _Adapter]]:
    """Return what was trained whole, by name, and the adapters, by layer or parameter.

    Raises:
        CheckpointError: a tensor belongs to no layer of the model.
    """
    known = set(persistent_tensors(model, tied_once=False))
    modules = {path: module for path, module in model.named_modules() if path}

    def place(name: str) -> str | None:
        if not is_adapter(name):
            return stored_name(name) if stored_name(name) in known else None
        layer = _TENSOR.sub("", name).replace(".base_layer", "")
        return layer if layer in modules else None

    found = adapters.named(lambda name: place(name) is not None)
    whole: dict[str, LazyTensor] = {}
    layers: dict[str, dict[str, LazyTensor]] = {}
    strangers = []
    for name, tensor in found.items():
        match = _TENSOR.search(name)
        if place(name) is None or (is_adapter(name) and match is None):
            strangers.append(name)
        elif match is None:
            whole[stored_name(name)] = tensor
        else:
            layers.setdefault(_TENSOR.sub("", name), {})[match[1]] = tensor
    if strangers:
        raise CheckpointError(
            f"'{adapters.path}' holds {len(strangers)} tensors that {type(model).__name__} has no layer for: "
            f"{shown(strangers)}; are they of another model?"
        )
    return whole, _of_parameters(layers, modules, adapters)


def _of_parameters(
    layers: Mapping[str, dict[str, LazyTensor]], modules: Mapping[str, nn.Module], adapters: AdapterFiles
) -> dict[str, _Adapter]:
    """Name the parameters that adapters belong to where their module has no `weight`: experts.

    PEFT wraps the module once for each parameter, in the module's order: the first one has the most `base_layer` in
    its name. Source: `BaseTuner._inject_parameters`.
    """
    targets = list(adapters.config.get("target_parameters") or ())
    named: dict[str, _Adapter] = {}
    for path, parts in layers.items():
        owner = path.replace(".base_layer", "")
        own = [name for name, _ in modules[owner].named_parameters(recurse=False)]
        adapted = [n for n in own if any(f"{owner}.{n}" == t or f"{owner}.{n}".endswith(f".{t}") for t in targets)]
        depth = path.count(".base_layer")
        if "weight" in own and not adapted:
            named[owner] = _Adapter(parts)
        elif depth < len(adapted):
            is_transposed = bool(getattr(modules[owner], "is_transposed", False))
            named[f"{owner}.{adapted[len(adapted) - 1 - depth]}"] = _Adapter(parts, is_transposed)
        else:
            raise CheckpointError(
                f"'{adapters.path}': {path} has adapters of parameters, and its settings' target_parameters "
                f"{targets} name none of {', '.join(own)}"
            )
    return named


def _scaling(config: Mapping[str, Any], layer: str, adapter: _Adapter) -> float:
    """Return the factor on an adapter's output.

    Raises:
        CheckpointError: the settings don't say alpha.
    """
    alpha = _of_layer(config.get("alpha_pattern"), layer, config.get("lora_alpha"))
    rank = _of_layer(config.get("rank_pattern"), layer, config.get("r"))
    if alpha is None:
        raise CheckpointError(
            "nothing beside the adapters says their alpha (adapter_config.json, or the header of diffusers' file); "
            "give the factor on their output, alpha / rank"
        )
    if rank is None:
        rank = next(tensor for kind, tensor in adapter.parts.items() if kind.endswith("_A")).shape[0]
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else float(rank))


def _of_layer(patterns: Mapping[str, Any] | None, layer: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that the end of a path fits. Source: `get_pattern_key` of PEFT."""
    fits = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", layer))
    return next(fits, otherwise)


def _merged(base: Node, adapter: _Adapter, factor: float, where: str) -> LazyTensor:
    parts, is_embedding = adapter.parts, "lora_embedding_A" in adapter.parts
    names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    if missing := [name for name in names if name not in parts]:
        raise CheckpointError(f"{where} lacks {missing[0]}")
    a, b = (parts[name] for name in names)
    shape = tuple(base.shape)
    if is_embedding:
        fits = (b.shape[0], a.shape[1]) == (shape[1], shape[0]) and a.shape[0] == b.shape[1]
        delta: _Product | None = _product_of_embedding if fits else None
    else:
        delta = _delta_of(shape, tuple(a.shape), tuple(b.shape), adapter.is_transposed)
    if delta is None:
        raise CheckpointError(
            f"{where} has shapes {tuple(a.shape)} and {tuple(b.shape)}, which don't fit a weight of {tuple(base.shape)}"
        )
    inputs = [LazyTensor(base), a, b]
    if "lora_magnitude_vector" in parts:
        inputs.append(parts["lora_magnitude_vector"])
        rows = (0,) if is_embedding else tuple(range(1, len(base.shape)))
        return computed(functools.partial(_with_magnitude, delta, factor, rows), inputs, base.dtype)
    return computed(functools.partial(_sum, delta, factor), inputs, base.dtype)


def _delta_of(shape: Sequence[int], a: Sequence[int], b: Sequence[int], is_transposed: bool) -> _Product | None:
    """Return the function of A and B that gives B·A in the shape of a weight; None: the shapes don't fit."""
    if len(shape) == len(a) == len(b) == 3 and (a[0], b[0], a[1]) == (shape[0], shape[0], b[2]):
        # experts, stacked as in checkpoints
        product = (shape[0], a[2], b[1]) if is_transposed else (shape[0], b[1], a[2])
        if product == tuple(shape):
            return (lambda a, b: (b @ a).mT) if is_transposed else (lambda a, b: b @ a)
    if len(a) == len(b) == 2 and len(shape) == 3:  # experts, as in PEFT's files: all their ranks in one dimension
        experts, first, second = shape
        features = (first, second) if is_transposed else (second, first)
        if a[0] == b[1] and a[0] % experts == 0 and (a[1], b[0]) == features:
            return functools.partial(_product_of_experts, experts, "eio" if is_transposed else "eoi")
    if len(a) == len(shape) and (b[0], a[0]) == (shape[0], b[1]) and tuple(a[1:]) == tuple(shape[1:]):
        return lambda a, b: (b.flatten(1) @ a.flatten(1)).view(*shape)
    return None


def _product_of_embedding(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (b @ a).T


def _product_of_experts(experts: int, order: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """B·A of each expert, [experts, out, in] or [experts, in, out]. Source: `ParamWrapper.get_delta_weight`."""
    of_a = a.reshape(experts, -1, a.shape[-1])
    of_b = b.reshape(b.shape[0], -1, experts)
    return torch.einsum(f"ore,eri->{order}", of_b, of_a)


@torch.no_grad()
def _sum(delta: _Product, factor: float, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (base.float() + factor * delta(a.float(), b.float())).to(base.dtype)


@torch.no_grad()
def _with_magnitude(
    delta: _Product,
    factor: float,
    dims: Sequence[int],
    base: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitude: torch.Tensor,
) -> torch.Tensor:
    weight = base.float() + factor * delta(a.float(), b.float())
    norm = torch.linalg.vector_norm(weight, dim=tuple(dims), keepdim=True)
    return (magnitude.float().reshape(norm.shape) / norm * weight).to(base.dtype)
