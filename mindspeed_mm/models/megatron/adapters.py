"""LoRA on Megatron-core's split layers: an adapter for each transformers layer that a fused layer consists of.

A layer gets its adapters as a submodule `adapters`, which a forward hook calls; its own parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from torch import nn

from mindspeed_mm.configs.lora import LoraOptions
from mindspeed_mm.models.common.adapters import AdapterPlan, inject_adapters
from mindspeed_mm.models.common.megatron_names import MEGATRON_LAYERS, ParamMapping, interleaved, same
from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.models.transformers.inferred import traits_of
from mindspeed_mm.utils.adapter_names import stored_name
from mindspeed_mm.utils.errors import ConfigError

#: name of Megatron-core's tracked random state that adapters' dropout draws from
DROPOUT_STATE = "adapters"
Mapped = Callable[[str], ParamMapping]


def plan_megatron_adapters(meta_model: nn.Module, options: LoraOptions) -> AdapterPlan:
    """Insert adapters into a transformers model on the meta device, from which all ranks read what is trained.

    Args:
        meta_model: the whole model, its parts frozen as model.json states.
        options: the run's; targets may have the names of MEGATRON_LAYERS too.

    Raises:
        ConfigError: see `plan_adapters`; or a target is no linear layer, or is the output layer.
    """
    where = "--lora-target-modules"
    if options.target_parameters:
        raise ConfigError(
            f"--lora-target-parameters {' '.join(options.target_parameters)}: this backend has adapters of linear "
            f"layers only; name layers in {where}, or add --use-torch-fsdp2"
        )
    plan = inject_adapters(meta_model, options, traits_of(meta_model).parts, MEGATRON_LAYERS)
    head = as_trainable(meta_model).output_layer
    for path in plan.modules:
        layer: Any = meta_model.get_submodule(path)
        if layer is head or not isinstance(layer.base_layer, nn.Linear):
            kind = "the output layer" if layer is head else f"a {type(layer.base_layer).__name__}"
            raise ConfigError(
                f"{where}: {path} is {kind}, which gets no adapter on the Megatron backend; train it whole "
                f"(--lora-modules-to-save {path}), or add --use-torch-fsdp2"
            )
    return plan


def add_adapters(
    chunk: nn.Module, mapping: Mapped, meta_model: nn.Module, options: LoraOptions
) -> dict[str, ParamMapping]:
    """Insert the adapters of a chunk's layers, and freeze all other weights but those that are trained whole.

    The adapters have no values yet.

    Args:
        chunk: may be on the meta device.
        mapping: name of a parameter of the chunk → the transformers tensors that it consists of.
        meta_model: the transformers model, after `plan_megatron_adapters`.
        options: the run's.

    Returns:
        name of an adapter's parameter in the chunk → its ParamMapping.

    Raises:
        ConfigError: a layer isn't split as Megatron-core splits layers, or only a part of a parameter is to be trained.
    """
    plan = as_trainable(meta_model).adapter_plan
    assert plan is not None
    _freeze_base(chunk, mapping, plan)
    rows = {stored_name(name): param.shape[0] for name, param in meta_model.named_parameters() if param.dim()}
    targets = set(plan.modules)
    found: dict[str, ParamMapping] = {}
    for name, layer in list(chunk.named_modules()):
        if layer._parameters.get("weight") is None:
            continue
        of_weight = mapping(f"{name}.weight")
        if targets.isdisjoint(source.removesuffix(".weight") for source in of_weight.sources):
            continue
        if not isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
            raise ConfigError(
                f"--lora-target-modules: {name} is a {type(layer).__name__}; adapters need Megatron-core's "
                "ColumnParallelLinear or RowParallelLinear"
            )
        adapters = LayerAdapters(layer, name, of_weight, [rows[s] for s in of_weight.sources], targets, options)
        layer.adapters = adapters
        layer.register_forward_hook(adapters.add_to)
        found |= {f"{name}.adapters.{own}": mapped for own, mapped in adapters.mappings().items()}
    return found


def track_dropout(seed: int) -> None:
    """Add DROPOUT_STATE to Megatron-core's tracked random states, unless it is there; tensor-parallel ranks share it.

    Args:
        seed: the run's.
    """
    tracker = tensor_parallel.get_cuda_rng_tracker()
    if DROPOUT_STATE not in tracker.get_states():
        ranks = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
        tracker.add(DROPOUT_STATE, seed + 1009 * (ranks[0] + 1) + 100003 * ranks[1])


def _freeze_base(chunk: nn.Module, mapping: Mapped, plan: AdapterPlan) -> None:
    for name, param in chunk.named_parameters():
        sources = mapping(name).sources
        whole = [source for source in sources if source in plan.whole]
        if whole and len(whole) < len(sources):
            raise ConfigError(
                f"--lora-modules-to-save: {', '.join(sources)} are one parameter on the Megatron backend, and only "
                f"{', '.join(whole)} would be trained whole; name all of them, or add --use-torch-fsdp2"
            )
        param.requires_grad_(bool(whole))


class LayerAdapters(nn.Module):
    """The adapters of a Column- or RowParallelLinear.

    Attributes:
        parts: an adapter for each transformers layer that the layer's weight consists of; None: it has none.
    """

    def __init__(
        self,
        layer: Any,
        name: str,
        mapping: ParamMapping,
        rows: Sequence[int],
        targets: set[str],
        options: LoraOptions,
    ) -> None:
        """
        Args:
            layer: the layer.
            name: its name, for messages.
            mapping: of its weight.
            rows: number of rows of each of the mapping's sources.
            targets: paths of the transformers layers that have adapters.
            options: the run's.

        Raises:
            ConfigError: the outputs of transformers' layers don't alternate in the layer's output.
        """
        super().__init__()
        self._mapping, self._uses_dora = mapping, options.use_dora
        split = _Split(layer)
        ranks = 1 if split.by_input else split.ranks
        pieces = 1
        if len(rows) > 1:
            pieces = len(mapping.blocks) // len(rows)
            if mapping.blocks != interleaved(mapping.sources, pieces).blocks or pieces % ranks:
                raise ConfigError(
                    f"--lora-target-modules: {name} consists of {', '.join(mapping.sources)} in another order than "
                    "adapters are placed in; add --use-torch-fsdp2"
                )
            pieces //= ranks
        self._pieces = pieces
        self._widths = [count // ranks // pieces for count in rows]
        self._paths = [source.removesuffix(".weight") for source in mapping.sources]
        self.parts = nn.ModuleDict()
        for number, path in enumerate(self._paths):
            if path in targets:
                self.parts[str(number)] = Adapter(split, rows[number] // ranks, options)

    def mappings(self) -> dict[str, ParamMapping]:
        """Return for each parameter, by its name in this module, its ParamMapping."""
        found = {}
        for name, _ in self.named_parameters():
            _, number, kind = name.split(".")
            stored = f"{self._paths[int(number)]}.{kind}{'' if kind == 'lora_magnitude_vector' else '.weight'}"
            has_rows = len(self._paths) == 1 and kind != "lora_A"
            found[name] = ParamMapping((stored,), self._mapping.blocks) if has_rows else same(stored)
        return found

    def add_to(self, layer: Any, args: tuple[Any, ...], output: tuple[Any, Any]) -> tuple[Any, Any]:
        """Add what the adapters give to a layer's output; a forward hook.

        Args:
            layer: the layer.
            args: its input [sequence, batch, in].
            output: its output [sequence, batch, out] and the bias that its caller adds.
        """
        x, (result, bias) = args[0], output
        lead, added = result.shape[:-1], []
        for number, width in enumerate(self._widths):
            shape = (*lead, self._pieces, width)
            if str(number) not in self.parts:
                added.append(result.new_zeros(shape))
                continue
            base = self._base(layer, result, number) if self._uses_dora else None
            added.append(self.parts[str(number)](x, base).view(shape))
        return result + torch.cat(added, dim=-1).view(result.shape), bias

    def _base(self, layer: Any, result: torch.Tensor, number: int) -> BaseLayer:
        return BaseLayer(
            self._own(layer.weight.t(), number).t(),
            self._own(result, number),
            None if layer.bias is None or layer.skip_bias_add else self._own(layer.bias, number),
        )

    def _own(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """Return the part of one transformers layer of what has the layer's outputs as its last dimension."""
        if len(self._widths) == 1:
            return tensor
        start, width = sum(self._widths[:number]), self._widths[number]
        return tensor.unflatten(-1, (self._pieces, -1)).narrow(-1, start, width).flatten(-2)


class BaseLayer(NamedTuple):
    """A rank's part of the transformers layer that an adapter belongs to.

    Attributes:
        weight: [out, in].
        output: [sequence, batch, out], the bias included.
        bias: [out]; None: it is not in `output`.
    """

    weight: torch.Tensor
    output: torch.Tensor
    bias: torch.Tensor | None


class _Split:
    """How a layer is split over tensor-parallel ranks."""

    def __init__(self, layer: Any) -> None:
        self.by_input = isinstance(layer, RowParallelLinear)
        self.sequence_parallel = bool(layer.sequence_parallel)
        self.group: dist.ProcessGroup = layer.tp_group
        self.ranks, self.rank = self.group.size(), self.group.rank()
        self.inputs, self.dtype = layer.weight.shape[1], layer.weight.dtype

    def cross(self, hidden: torch.Tensor) -> torch.Tensor:
        """Bring what is computed of a rank's input to where outputs are computed of, as the layer does."""
        if self.by_input and self.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(hidden, group=self.group)
        if self.by_input:
            return tensor_parallel.reduce_from_tensor_model_parallel_region(hidden, group=self.group)
        if self.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(hidden, group=self.group)
        return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=self.group)

    def parameter(self, *shape: int, dim: int | None) -> nn.Parameter:
        """Return an empty parameter.

        Args:
            dim: dimension that the ranks have parts of; None: the parameter is whole on each. Under sequence
                parallelism a rank's gradient of a whole one is that of its part of the sequence.
        """
        param = nn.Parameter(torch.empty(shape, dtype=self.dtype))
        set_tensor_model_parallel_attributes(param, dim is not None, 0 if dim is None else dim, 1)
        param.sequence_parallel = dim is None and self.sequence_parallel  # type: ignore[attr-defined]
        return param


class Adapter(nn.Module):
    """A rank's part of the adapter of one transformers layer.

    Without DoRA it adds B (A x) · scaling. Source: Hu et al., arXiv:2106.09685.
    """

    def __init__(self, split: _Split, outputs: int, options: LoraOptions) -> None:
        """
        Args:
            split: how its layer is split.
            outputs: number of the layer's outputs on this rank.
            options: the run's.
        """
        super().__init__()
        self._split, self._scaling, self._dropout = split, options.scaling, options.dropout
        of_outputs = None if split.by_input else 0
        # parameters of the module that is called: by its hooks, Megatron-core gathers them before they are used
        self.lora_A = split.parameter(options.r, split.inputs, dim=1 if split.by_input else None)
        self.lora_B = split.parameter(outputs, options.r, dim=of_outputs)
        self.lora_magnitude_vector = split.parameter(outputs, dim=of_outputs) if options.use_dora else None

    def forward(self, x: torch.Tensor, base: BaseLayer | None) -> torch.Tensor:
        """Return what is added to the layer's output.

        Args:
            x: the layer's input [sequence, batch, in], as it is split.
            base: the layer; None: without DoRA.

        Returns:
            [sequence, batch, out], as the layer's output is split.
        """
        dropped = self._drop(x) if self.training and self._dropout else x
        added = F.linear(self._split.cross(F.linear(dropped, self.lora_A)), self.lora_B) * self._scaling
        if self.lora_magnitude_vector is None or base is None:
            return added
        factor = self.lora_magnitude_vector / self._norms(base.weight)
        return (factor - 1) * self._output(base, x, dropped) + factor * added

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements of the input.

        The mask is drawn as nn.Dropout of a transformers layer draws it, whole on each tensor-parallel rank, and from a
        random state that they share: any tensor-parallel size trains on the same masks.
        """
        length, rows, width = x.shape
        dim, ranks, rank = 2 if self._split.by_input else 1, self._split.ranks, self._split.rank
        if not self._split.by_input and not self._split.sequence_parallel:
            ranks, rank = 1, 0
        shape = [rows, length, width]
        shape[dim] *= ranks
        with tensor_parallel.get_cuda_rng_tracker().fork(DROPOUT_STATE):
            mask = F.dropout(x.new_ones(shape), self._dropout)
        return x * mask.narrow(dim, rank * (shape[dim] // ranks), shape[dim] // ranks).transpose(0, 1)

    @torch.no_grad()
    def _norms(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the norms of the rows of the layer's weight with its adapter, constants to the gradient.

        Source: Liu et al., arXiv:2402.09353, section 4.3.
        """
        squares = (weight + self._scaling * (self.lora_B @ self.lora_A)).float().square().sum(1)
        if self._split.by_input and self._split.ranks > 1:
            dist.all_reduce(squares, group=self._split.group)
        return squares.sqrt().to(weight.dtype)

    def _output(self, base: BaseLayer, x: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
        """Return the layer's output without its bias, of the dropped input if elements of it are dropped."""
        if dropped is x:
            return base.output if base.bias is None else base.output - base.bias
        if self._split.by_input:
            return self._split.cross(F.linear(dropped, base.weight))
        return F.linear(self._split.cross(dropped), base.weight)
