"""Planning of tensor parallelism: which layers of a model are split, and whether their sizes allow it.

Planning needs no process group and no values: it works on a model on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.parallel_checks import parts_over_tensor_ranks
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.parallel.patterns import join_paths
from mindspeed_mm.utils.adapter_names import is_adapter, stored_name
from mindspeed_mm.utils.errors import ConfigError

#: names of linear layers that no pattern may split, and the reason
_NOT_SPLIT = {
    **dict.fromkeys(
        ("qkv_proj", "query_key_value", "qkv", "c_attn", "gate_up_proj"),
        "its output consists of several projections one after the other, and each rank needs a part of each",
    ),
    **dict.fromkeys(
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        "multi-head latent attention is not split by tensor parallelism",
    ),
    **dict.fromkeys(
        ("in_proj_qkv", "in_proj_qkvz", "in_proj_ba", "in_proj_z", "in_proj_b", "in_proj_a"),
        "linear attention is not split by tensor parallelism",
    ),
}


@dataclass(frozen=True)
class TensorPlan:
    """Names of what tensor parallelism splits in the decoder layers of a family; the defaults fit Llama-like decoders.

    Attributes:
        columns: linear layers of which each rank computes a part of the outputs (its heads, its part of an MLP).
        rows: linear layers that follow them, of which each rank has the same part of the inputs.
        head_norms: norms of single heads: whole on every rank, applied to the heads of the rank.
        head_parameters: parameters of attention modules with one value for each head (attention sinks).
        whole: linear layers that every rank computes whole (routers).
        uncut_layers: (transformers model) → number of its first decoder layers to which sequence parallelism doesn't
            apply, as the model itself changes whole rows after them. None: all layers follow one another directly.
    """

    columns: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    rows: tuple[str, ...] = ("o_proj", "down_proj")
    head_norms: tuple[str, ...] = ("q_norm", "k_norm")
    head_parameters: tuple[str, ...] = ("sinks",)
    whole: tuple[str, ...] = ("gate", "router", "shared_expert_gate")
    uncut_layers: Callable[[Any], int] | None = None


@dataclass(frozen=True)
class TensorTarget:
    """What planning must know of a model.

    Attributes:
        model: the model; it may be on the meta device.
        name: name of its class, for messages.
        layers: path of the list of its decoder layers; None: unknown, so that it needs path patterns.
        head: path of its output layer over the vocabulary; None: it has none.
        sizes: what the ranks share beside layers, by its name in the plural: attention heads, key-value heads.
        plan: the family's names.
    """

    model: nn.Module
    name: str
    layers: str | None = None
    head: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    plan: TensorPlan = field(default_factory=TensorPlan)


@dataclass(frozen=True)
class TensorSplit:
    """The modules that tensor parallelism changes, by path.

    Attributes:
        columns: linear layers whose outputs are split: weight [out / tp, in].
        rows: linear layers whose inputs are split: weight [out, in / tp].
        gathered: those of `columns` whose outputs are gathered, as no layer of `rows` follows them.
        blocks: attention and MLP modules of decoder layers, whose input only layers of `columns` use.
        embeddings: embeddings that share their weight with a layer of `columns`: split over the vocabulary.
        head_norms: norms of single heads.
        head_parameters: attention modules → names of their parameters with one value for each head.
        adapted: those of `columns` and `rows` with LoRA adapters → PEFT's layer around the linear layer.
    """

    columns: Mapping[str, nn.Linear] = field(default_factory=dict)
    rows: Mapping[str, nn.Linear] = field(default_factory=dict)
    gathered: frozenset[str] = frozenset()
    blocks: Mapping[str, nn.Module] = field(default_factory=dict)
    embeddings: Mapping[str, nn.Embedding] = field(default_factory=dict)
    head_norms: Mapping[str, nn.Module] = field(default_factory=dict)
    head_parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    adapted: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all modules of which each rank has a part."""
        return (*self.columns, *self.rows, *self.embeddings, *self.head_parameters)


def plan_tensor_parallel(
    target: TensorTarget,
    dims: Dims,
    columns: Mapping[str, nn.Module] | None = None,
    rows: Mapping[str, nn.Module] | None = None,
    *,
    where: str = "fsdp2.yaml",
) -> TensorSplit:
    """Find what tensor parallelism splits.

    Args:
        target: the model.
        dims: sizes of the parallelisms.
        columns, rows: the modules that fsdp2.yaml's `tp_colwise` and `tp_rowwise` match; both None: the family's.
        where: name of that file, for messages.

    Raises:
        ConfigError: layers that can't be split, all in one message.
    """
    if columns is None and rows is None:
        columns, rows = _layers_of_family(target, where)
    chosen = {"tp_colwise": dict(columns or {}), "tp_rowwise": dict(rows or {})}
    split = _collect(target, chosen, where)
    problems = _refuse_unmatched(target, split, where)
    flag = "--tensor-model-parallel-size"
    if any(path != target.head for path in split.columns):
        for what, number in target.sizes.items():
            problems += parts_over_tensor_ranks(f"{flag} {dims.tp}: {target.name}", number, what, dims)
    for path, layer in split.columns.items():
        what = "tokens of the vocabulary" if path == target.head else "output features"
        problems += parts_over_tensor_ranks(f"{flag} {dims.tp}: '{path}'", layer.out_features, what, dims)
    for path, layer in split.rows.items():
        problems += parts_over_tensor_ranks(f"{flag} {dims.tp}: '{path}'", layer.in_features, "input features", dims)
    problems += _refuse_norms_over_heads(split)
    raise_all(list(dict.fromkeys(problems)))
    return split


def _layers_of_family(target: TensorTarget, where: str) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return the column and row layers by the family's names; every linear layer of a decoder layer must be known."""
    if target.layers is None:
        raise ConfigError(
            f"{where}: tensor parallelism needs tp_colwise and tp_rowwise, the module paths of the layers to split, as "
            f"{target.name} states no decoder layers"
        )
    plan, model = target.plan, target.model
    columns: dict[str, nn.Module] = {}
    rows: dict[str, nn.Module] = {}
    problems = []
    for below, module in own_modules(model.get_submodule(target.layers)).items():
        path, name = join_paths(target.layers, below), below.rpartition(".")[2]
        if "experts" in below.split(".")[:-1] or not isinstance(module, nn.Linear) or name in plan.whole:
            continue
        if name in plan.columns:
            columns[path] = module
        elif name in plan.rows:
            rows[path] = module
        else:
            reason = _NOT_SPLIT.get(name, "the family does not state how it is split")
            problems.append(f"'{path}' of {target.name}: {reason}")
    if problems:
        shown = problems[:3] + ([f"and {len(problems) - 3} more"] if len(problems) > 3 else [])
        raise ConfigError(
            f"--tensor-model-parallel-size: {'; '.join(shown)}; write 1, or name the layers to split in {where}'s "
            "tp_colwise and tp_rowwise"
        )
    if not columns:
        raise ConfigError(
            f"--tensor-model-parallel-size: '{target.layers}' of {target.name} has no layer with a name of "
            f"{', '.join(plan.columns)}; name the layers to split in {where}'s tp_colwise and tp_rowwise"
        )
    if target.head is not None:
        columns[target.head] = own_modules(model)[target.head]
    return columns, rows


def own_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's modules by the paths that they have without adapters: its own, not those of PEFT around them."""
    return {stored_name(path): module for path, module in model.named_modules() if not is_adapter(path)}


def _collect(target: TensorTarget, chosen: Mapping[str, Mapping[str, nn.Module]], where: str) -> TensorSplit:
    problems = []
    own = own_modules(target.model)
    chosen = {key: {path: own[path] for path in modules} for key, modules in chosen.items()}
    for key, modules in chosen.items():
        for path, module in modules.items():
            name = path.rpartition(".")[2]
            if not isinstance(module, nn.Linear):
                problems.append(f"{where}: {key}: '{path}' is a {type(module).__name__}; expected linear layers")
            elif name in _NOT_SPLIT:
                problems.append(f"{where}: {key}: '{path}' can't be split: {_NOT_SPLIT[name]}")
    both = chosen["tp_colwise"].keys() & chosen["tp_rowwise"].keys()
    problems += [f"{where}: tp_colwise and tp_rowwise both match '{path}'; expected one of them" for path in both]
    raise_all(problems)
    columns, rows = ({p: m for p, m in modules.items() if isinstance(m, nn.Linear)} for modules in chosen.values())
    parents = {path.rpartition(".")[0] for path in rows}
    weights = {id(layer.weight) for layer in columns.values()}
    tied = {path: m for path, m in own.items() if id(m._parameters.get("weight")) in weights}
    embeddings = {path: m for path, m in tied.items() if isinstance(m, nn.Embedding)}
    for path, module in tied.items():
        if path not in columns and path not in embeddings:
            problems.append(f"'{path}' ({type(module).__name__}) shares the weight of a layer that is split")
    adapted = _with_adapters(target.model)
    problems += _refuse_adapters(adapted, (*columns, *rows), embeddings)
    raise_all(problems)
    attention = {path.rpartition(".")[0] for path in columns if path != target.head}
    norms = {
        join_paths(parent, name): child
        for parent in sorted(attention)
        for name, child in target.model.get_submodule(parent).named_children()
        if name in target.plan.head_norms and list(child.parameters())
    }
    of_heads = {
        parent: names
        for parent in sorted(attention)
        if (names := _present(target.model.get_submodule(parent), target.plan.head_parameters))
    }
    gathered = frozenset(path for path in columns if path.rpartition(".")[0] not in parents)
    blocks = {parent: target.model.get_submodule(parent) for parent in sorted(parents) if _is_in_layer(parent, target)}
    adapted = {path: layer for path, layer in adapted.items() if path in columns or path in rows}
    return TensorSplit(columns, rows, gathered, blocks, embeddings, norms, of_heads, adapted)


def _with_adapters(model: nn.Module) -> dict[str, nn.Module]:
    """Return PEFT's layers by the paths of the layers inside of them."""
    inside = [path for path, _ in model.named_modules() if path.endswith(".base_layer") and not is_adapter(path)]
    return {stored_name(path): model.get_submodule(path.removesuffix(".base_layer")) for path in inside}


def _refuse_adapters(adapted: Mapping[str, nn.Module], layers: Iterable[str], embeddings: Iterable[str]) -> list[str]:
    problems = [
        f"--tensor-model-parallel-size: '{path}' shares its weight with the output layer, so it is split by "
        "vocabulary, which its adapters (--lora-target-modules) are not; write 1, or leave it out of the targets"
        for path in embeddings
        if path in adapted
    ]
    for path in layers:
        if path in adapted and any("lora_magnitude_vector" in name for name, _ in adapted[path].named_parameters()):
            problems.append(
                f"--lora-use-dora: the magnitudes of '{path}' are those of whole weights, and "
                "--tensor-model-parallel-size splits it; write 1, or leave --lora-use-dora out"
            )
            break
    return problems


def _is_in_layer(path: str, target: TensorTarget) -> bool:
    """Whether the module at `path` is inside of a decoder layer: a layer itself adds its input to its output."""
    below = path.removeprefix(f"{target.layers}.")
    return target.layers is not None and below != path and "." in below


def _present(module: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if module._parameters.get(name) is not None)


def _refuse_unmatched(target: TensorTarget, split: TensorSplit, where: str) -> list[str]:
    """Report linear layers beside split ones that no pattern matches: they would receive parts, or their input's."""
    problems = []
    split_layers, own = {**split.columns, **split.rows}, own_modules(target.model)
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in split.rows):
        for name, _ in target.model.get_submodule(parent).named_children():
            path = join_paths(parent, name)
            if isinstance(own[path], nn.Linear) and path not in split_layers and name not in target.plan.whole:
                problems.append(
                    f"{where}: '{path}' is beside layers that are split, and neither tp_colwise nor tp_rowwise matches "
                    "it; add it to one of them"
                )
        if not any(path.rpartition(".")[0] == parent for path in split.columns):
            problems.append(
                f"{where}: tp_rowwise matches layers of '{parent}', but tp_colwise none: their inputs would not be "
                "split; add the layers before them to tp_colwise"
            )
    return problems


def _refuse_norms_over_heads(split: TensorSplit) -> list[str]:
    """Report a norm that is computed over all heads at once: a rank has only some of them."""
    problems = []
    for path, norm in split.head_norms.items():
        parent, _, name = path.rpartition(".")
        layer = split.columns.get(f"{parent}.{name.replace('norm', 'proj')}")
        size = sum(p.numel() for n, p in norm.named_parameters() if n == "weight")
        if layer is not None and size == layer.out_features:
            problems.append(
                f"--tensor-model-parallel-size: '{path}' is a norm over the {size} features of all heads, which is not "
                "split by tensor parallelism; write 1"
            )
    return problems
