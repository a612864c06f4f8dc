"""Load weights into a model that is already sharded: each rank reads only its part of the files."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.checkpoint.lazy import LazyTensor, Node, rounded, whole
from mindspeed_mm.checkpoint.sources import WeightSource, shown
from mindspeed_mm.checkpoint.tensors import local_part, persistent_tensors
from mindspeed_mm.models.common.diffusers_init import is_diffusers_class
from mindspeed_mm.models.common.quantized import NF4Linear, packed_layers, quantize
from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.models.transformers.meta_model import build_meta_copy, type_without_fsdp
from mindspeed_mm.parallel.frozen import narrow_frozen
from mindspeed_mm.utils.adapter_names import is_adapter
from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.log import info_rank0, notice

_THREADS = min(4, os.cpu_count() or 1)  # reading is waiting for the disk, or for pages to be mapped
# prefixes of a model's names in torch_dcp folders of various programs; the best match is used
_PREFIXES: tuple[str, ...] = ("model.", "", "module.", "model.module.", "model.model.", "state_dict.")
# and of models inside PEFT's wrapper: published bases for LoRA
_PREFIXES += tuple(f"{outer}base_model.model.{inner}" for outer in ("", "model.") for inner in ("", "model."))


@dataclass
class WeightPlan:
    """The mapping of a source's tensors to a model's tensors.

    Attributes:
        values: name in the model → expression over the source's tensors, with the shape of the whole tensor.
        missing: names in the model without a tensor in the source.
        unexpected: names in the source without a tensor in the model.
        left_out: names in the source of components that the model's class doesn't have (an Omni model's talker).
        mismatched: (name, shape in the source, shape in the model).
        conversions: transformers' weight conversions that were applied, needed to export in the hub's layout.
    """

    values: dict[str, Node] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    conversions: list[Any] | None = None

    @property
    def problems(self) -> int:
        """Number of tensors that don't match."""
        return len(self.missing) + len(self.unexpected) + len(self.mismatched)


def plan_weights(model: nn.Module, source: WeightSource) -> WeightPlan:
    """Find the expression of every tensor of `model` over the source's tensors.

    A source in the hub's layout is converted with transformers' conversions for the model's class (renamed, stacked,
    tied). A source in the model's layout is matched by name, under the prefix that matches best; names of an older
    layout of the class are converted as well.
    """
    found = source.tensors()
    if source.in_hub_layout and not _has_conversions(model):
        plan = _plan_exact(model, found)
        if is_diffusers_class(type(model)):
            plan.left_out = names_left_out(model, plan.unexpected)
            plan.unexpected = [name for name in plan.unexpected if name not in plan.left_out]
            return replace(plan, conversions=[])
        if not plan.problems:
            return replace(plan, conversions=[])
    meta_model = build_meta_copy(model)
    if source.in_hub_layout:
        return _plan(model, meta_model, found)
    stripped = [{k.removeprefix(p): v for k, v in found.items() if k.startswith(p)} for p in _PREFIXES]
    best: WeightPlan | None = None
    # exact names first, under every prefix: transformers adds and drops prefixes too, and would match a part of them
    for convert in (False, True) if meta_model is not None else (False,):
        for part in filter(None, stripped):
            plan = _plan(model, build_meta_copy(model), part) if convert else _plan_exact(model, part)
            if best is None or plan.problems < best.problems:
                best = plan
            if not plan.missing and not plan.mismatched:
                return plan
    return best or WeightPlan(missing=sorted(persistent_tensors(model)))


def load_weights(
    model: nn.Module,
    source: WeightSource,
    *,
    strict: bool = True,
    downcast: bool = False,
    frozen: torch.dtype | None = None,
) -> WeightPlan:
    """Fill the parameters and persistent buffers of `model`, sharded or not, from `source`.

    Of a layer in 4 bits, each rank quantises the rows that are its own.
    On the host, a parameter whose region is contiguous in a safetensors file of the same dtype becomes a private memory
    map of it (pages are copied when training first writes to them), as in transformers' loading.

    Args:
        strict: raise if a tensor is missing or left over; False: log a notice, and missing ones keep their values.
        downcast: round floating-point values through bfloat16 (--downcast-to-bf16).
        frozen: the dtype that frozen weights are kept in if it holds their values; see `narrow_frozen`. None: float32.

    Raises:
        CheckpointError: a shape differs, or with `strict` a tensor is missing or left over; nothing has been changed.
    """
    plan = plan_weights(model, source)
    refuse_misfits(plan, model, source, strict=strict)
    if frozen is not None:
        stored = {name: torch.bfloat16 if downcast else node.dtype for name, node in plan.values.items()}
        narrow_frozen(model, frozen, stored, as_trainable(model).keeps_in_float32(frozen), str(source.path))
    work = []
    packed = packed_layers(model)
    adopted: dict[int, torch.Tensor] = {}
    for names, target in _targets(model):
        node = next((plan.values[n] for n in names if n in plan.values), None)
        if node is not None:
            node = rounded(node, torch.bfloat16) if downcast and node.dtype.is_floating_point else node
            work.append((target, node, packed.get(id(target))))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="load-weights") as pool:
        for _ in pool.map(lambda item: _fill(*item, adopted), work):
            pass
    return plan


def refuse_misfits(plan: WeightPlan, model: nn.Module, source: WeightSource, *, strict: bool) -> None:
    """Raise an error, or without `strict` log a notice, if the tensors of a source and a model don't match.

    Raises:
        CheckpointError: a shape differs; or with `strict`, a tensor is missing or left over.
    """
    name = type(model).__name__.removeprefix("FSDP")
    if plan.mismatched:
        key, found, expected = plan.mismatched[0]
        raise CheckpointError(
            f"'{source.path}': {key} has shape {found}, {name} needs {expected} ({len(plan.mismatched)} such tensors); "
            "the model's configuration and these weights don't belong together"
        )
    if plan.left_out:
        parts = Counter(key.partition(".")[0] for key in plan.left_out)
        unread = ", ".join(f"{part} ({number})" for part, number in sorted(parts.items()))
        notice(f"'{source.path}' holds weights that {name} has no part for, which are not read: {unread}")
    misfits = []
    if plan.missing:
        misfits.append(f"lacks {len(plan.missing)} of {name}'s tensors: {shown(plan.missing)}")
    if plan.unexpected:
        misfits.append(f"holds {len(plan.unexpected)} that {name} has no place for: {shown(plan.unexpected)}")
    if not misfits:
        return
    text = f"'{source.path}' " + " and ".join(misfits)
    if strict and is_diffusers_class(type(model)) and len(plan.missing) > len(plan.values):
        raise CheckpointError(text + _other_layout(model, source))
    if strict:
        raise CheckpointError(f"{text}; if that is meant, add --no-strict-load (what is missing keeps random values)")
    notice(text, key=f"misfits {source.path}")


def _other_layout(model: nn.Module, source: WeightSource) -> str:
    """Return advice for weights that a diffusers model mostly doesn't have: another model's, or in another layout."""
    cls = type_without_fsdp(model)
    if not hasattr(cls, "from_single_file"):
        return f"; these are the weights of another model than {cls.__name__}, or not in diffusers' layout"
    return (
        "; if these are the model's weights as its authors publish them, convert them with diffusers: "
        f"{cls.__name__}.from_single_file('FILE in {source.path}').save_pretrained('DIRECTORY'), and name that "
        "directory"
    )


def names_left_out(model: Any, names: Iterable[str]) -> list[str]:
    """Return the names that the model's library silently ignores when it loads the class (an Omni model's talker)."""
    patterns = as_trainable(model).left_out
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def _has_conversions(model: nn.Module) -> bool:
    """Whether transformers has weight conversions for this model or a part of it."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    names = {type_without_fsdp(part).__name__ for part in parts} | {part.config.model_type for part in parts}
    return any(get_checkpoint_conversion_mapping(name) for name in names)


def _plan_exact(model: nn.Module, found: Mapping[str, LazyTensor]) -> WeightPlan:
    plan, packed = WeightPlan(), packed_layers(model)
    taken: set[str] = set()
    for names, target in _targets(model):
        layer = packed.get(id(target))
        shape = tuple(target.shape) if layer is None else (layer.out_features, layer.in_features)
        name = next((n for n in names if n in found), None)
        taken.update(n for n in names if n in found)
        if name is None:
            plan.missing.append(names[0])
        elif tuple(found[name].shape) != shape:
            plan.mismatched.append((names[0], tuple(found[name].shape), shape))
        else:
            present = [n for n in names if n in found]
            _refuse_different_ties(present, [found[n].node for n in present])
            plan.values[names[0]] = found[name].node
    plan.unexpected = sorted(k for k in found if k not in taken and not k.endswith("_extra_state"))
    return plan


def _plan(model: nn.Module, meta_model: Any, found: Mapping[str, LazyTensor]) -> WeightPlan:
    """Let transformers load and convert lazy tensors into a meta model; its parameters are then expressions."""
    if meta_model is None:
        return _plan_exact(model, found)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging as transformers_logging

    mapping = get_model_conversion_mapping(
        meta_model, getattr(type(meta_model), "_checkpoint_conversion_mapping", None) or None
    )
    settings = LoadStateDictConfig(dtype=None, device_map={"": "cpu"}, weight_mapping=mapping)
    shows_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        info, _ = convert_and_load_state_dict_in_model(meta_model, dict(found), settings, None)
    finally:
        if shows_bars:
            transformers_logging.enable_progress_bar()
    if info.conversion_errors:
        name, error = next(iter(info.conversion_errors.items()))
        raise CheckpointError(
            f"weight '{name}' can't be converted to the layout of {type(meta_model).__name__}: {error}"
        )
    meta_model._adjust_missing_and_unexpected_keys(info)
    plan = WeightPlan(unexpected=sorted(info.unexpected_keys), conversions=meta_model._weight_conversions)
    plan.left_out = names_left_out(meta_model, found)
    plan.mismatched = [(n, tuple(a), tuple(b)) for n, a, b in sorted(info.mismatched_keys)]
    lazy = {n: t for n, t in persistent_tensors(meta_model, tied_once=False).items() if isinstance(t, LazyTensor)}
    for names, target in _targets(model):
        loaded = [n for n in names if n in lazy]
        if loaded:
            _refuse_different_ties(names, [lazy[n].node for n in loaded])
            plan.values[names[0]] = lazy[loaded[0]].node
        elif names[0] in info.missing_keys or target.is_meta:
            plan.missing.append(names[0])
    return plan


def _refuse_different_ties(names: Sequence[str], nodes: Sequence[Node]) -> None:
    first, *others = nodes
    for other in others:
        same = first.shape == other.shape and all(torch.equal(a, b) for a, b in zip(_rows(first), _rows(other)))
        if not same:
            raise CheckpointError(
                f"{' and '.join(names)} are tied by the model's configuration, but the files hold different values for "
                'them; set "tie_word_embeddings": false in config.json to train both, or remove one'
            )


def _rows(node: Node) -> Iterator[torch.Tensor]:
    rows = node.shape[0] if node.shape else 1
    count = max(4096, -(-rows // 8))  # few blocks, as each read from a torch_dcp folder reads a whole stored piece
    for start in range(0, rows, count):
        region = ((start, min(count, rows - start)), *whole(node.shape)[1:]) if node.shape else ()
        yield node.read(region)


def _targets(model: nn.Module) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield each parameter and persistent buffer of the model itself once, with all of its names; no adapters."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in persistent_tensors(model, tied_once=False).items():
        if is_adapter(name):
            continue
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield names[key], tensor


@torch.no_grad()  # the mode is thread-local
def _fill(target: torch.Tensor, node: Node, layer: NF4Linear | None, adopted: dict[int, torch.Tensor]) -> None:
    """Load the value of `node` into `target`.

    Args:
        layer: the layer whose packed weight `target` is; None: it is no packed weight.
        adopted: address of a value → the parameter that uses its storage; no second parameter may use it (tensors of a
            `.bin` file may share storage).
    """
    local, region = local_part(target)
    if 0 in local.shape:
        return
    if layer is not None:
        rows = node.read((region[0], (0, layer.in_features)))
        local.copy_(quantize(rows.to(local.device)))
        return
    on_host = not accelerator.current().holds(local)
    if on_host and local.dtype == node.dtype and isinstance(target, nn.Parameter):
        value = node.read(region)
        if value.is_contiguous() and adopted.setdefault(value.data_ptr(), target) is target:
            local.data = value
            return
        local.copy_(value)
        return
    node.read_into(region, local)


def report_loaded(source: WeightSource, plan: WeightPlan) -> None:
    """Log the number of loaded tensors and their source on rank 0."""
    info_rank0(f"weights: {len(plan.values)} tensors from '{source.path}'")
