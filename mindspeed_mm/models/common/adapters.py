"""LoRA: which layers of a model get adapters, and their insertion by PEFT.

A model gets its adapters before it is sharded, with its weights still on the meta device or not; its own weights are
frozen then. Names in files are PEFT's (`utils/adapter_names.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from mindspeed_mm.configs.lora import LoraOptions
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.models.common.expert_adapters import from_peft, stack_by_expert, to_peft
from mindspeed_mm.models.common.megatron_names import MEGATRON_LAYERS
from mindspeed_mm.models.common.paths import find_modules
from mindspeed_mm.models.common.quantized import quantize_base, refuse_experts
from mindspeed_mm.models.contract import Shardable, as_trainable
from mindspeed_mm.parallel.materialize import copy_whole, has_meta_tensors
from mindspeed_mm.parallel.patterns import containing_path, join_paths
from mindspeed_mm.parallel.tensor import own_part
from mindspeed_mm.utils.adapter_names import ADAPTER, is_adapter, stored_name
from mindspeed_mm.utils.errors import ConfigError, nearest_names
from mindspeed_mm.utils.log import info_rank0
from mindspeed_mm.utils.seeds import seeded

_LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ALL_LINEAR = "all-linear"
#: part of published files → parts of a family's traits
_PARTS_OF = {"image_encoder": ("vision_encoder", "vision_projector")}
LayerNames: TypeAlias = "Mapping[str, str] | Mapping[str, tuple[str, ...]]"


@dataclass(frozen=True)
class AdapterPlan:
    """What a model's adapters belong to, and what else is trained.

    Attributes:
        modules: paths of layers, in the model's order.
        parameters: names of parameters that get adapters by themselves.
        whole: names of parameters that are trained whole: of `modules_to_save`, or of parts without adapters.
        saved_modules: paths of the modules of `modules_to_save`, and of those that share their weights.
    """

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    whole: frozenset[str]
    saved_modules: tuple[str, ...]


def plan_adapters(
    model: nn.Module, options: LoraOptions, parts: Mapping[str, Sequence[str]], names: LayerNames | None = None
) -> AdapterPlan:
    """Find what gets adapters in a model whose frozen parts are frozen already.

    Args:
        model: a model without adapters; may be on the meta device.
        options: the run's.
        parts: name of a part → its module paths; see `FamilyTraits.parts`.
        names: name of a layer that published scripts use → its name in the model, or those of the layers that it
            stands for, some of which the model may lack; None: there are none.

    Raises:
        ConfigError: a target matches nothing, or only layers of frozen parts; or a part is unknown.
    """
    finder = _Finder(model, parts, options.apply_to, names or {})
    problems: list[str] = []
    modules: dict[str, None] = {}
    for word in options.target_modules:
        problems += _collect(modules, finder.modules, word)
    parameters: dict[str, None] = {}
    for word in options.target_parameters:
        problems += _collect(parameters, finder.parameters, word)
    saved: dict[str, None] = {}
    for word in options.modules_to_save:
        problems += _collect(saved, finder.saved, word)
    problems += [
        f"--lora-target-modules and --lora-modules-to-save both name {path}; it gets adapters or is trained whole"
        for path in modules
        if containing_path(path, saved) is not None
    ]
    raise_all(problems)
    named = _names_of_parameters(model)
    whole = {
        name
        for name, names in named.items()
        if any(containing_path(other, saved) is not None for other in names)
        or (
            options.mixed_training
            and finder.is_beside(name)
            and model.get_parameter(name).requires_grad
            and containing_path(name, modules) is None
        )
    }
    for name in sorted(whole):  # of a tied weight, all modules are saved
        if len(named[name]) > 1:
            saved |= dict.fromkeys(m for n in named[name] if containing_path(m := n.rpartition(".")[0], saved) is None)
    order = [path for path, _ in model.named_modules() if path in modules]
    return AdapterPlan(tuple(order), tuple(parameters), frozenset(whole), tuple(saved))


def _names_of_parameters(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of each parameter, by its first one; a tied parameter has several."""
    named: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in named.values()}


def inject_adapters(
    model: nn.Module, options: LoraOptions, parts: Mapping[str, Sequence[str]], names: LayerNames | None = None
) -> AdapterPlan:
    """Insert adapters by PEFT, and freeze all other weights but those that `options` trains whole.

    The adapters have no values yet; `draw_adapters` gives them some. Arguments and errors are those of `plan_adapters`.
    """
    from peft import inject_adapter_in_model

    if options.quantize is not None:
        refuse_experts(model)
    plan = plan_adapters(model, options, parts, names)
    config = peft_config(options, plan)
    # exact paths: the entries of a list would match the ends of longer paths too
    config.target_modules = "|".join(map(re.escape, plan.modules)) or None
    with _without_config(model):
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    stack_by_expert(model)
    model.adapter_plan = plan  # type: ignore[assignment]
    for name, param in model.named_parameters():
        param.requires_grad_(is_adapter(name) or stored_name(name) in plan.whole)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for n, p in model.named_parameters() if not is_adapter(n))
    info_rank0(
        f"LoRA: adapters of rank {options.r} for {len(plan.modules) + len(plan.parameters)} layers, "
        f"{trained / total:.2%} of {total} parameters trained{_beside(plan)}"
    )
    info_rank0(f"LoRA: adapters are at {_listed((*plan.modules, *plan.parameters))}")
    if plan.whole:
        info_rank0(f"LoRA: trained whole: {_listed(sorted(plan.whole))}")
    return plan


def peft_config(options: LoraOptions, plan: AdapterPlan) -> Any:
    """Return PEFT's LoraConfig of a model's adapters; `target_modules` are whole paths."""
    from peft import LoraConfig

    return LoraConfig(
        r=options.r,
        lora_alpha=options.identity["lora_alpha"],  # type: ignore[arg-type]
        lora_dropout=options.dropout,
        use_rslora=options.use_rslora,
        use_dora=options.use_dora,
        target_modules=list(plan.modules),
        target_parameters=list(plan.parameters) or None,
        init_lora_weights=False,
    )


def prepare_adapters(
    contract: Shardable,
    options: LoraOptions,
    frozen: torch.dtype | None = None,
    *,
    quantizes: bool = False,
    draws: bool = False,
) -> None:
    """Insert adapters into a model that has not done so itself, as classes of users don't.

    Args:
        contract: of a model that isn't sharded yet.
        frozen: the dtype that frozen weights are stored in, in which they compute; None: as they are.
        quantizes: store frozen linear layers as `options.quantize` says.
        draws: whether weights that come from no directory are drawn at random.

    Raises:
        ConfigError: weights would be quantised that are drawn at random.
    """
    module, traits = contract.sharded_module, contract.traits
    if as_trainable(module).adapter_plan is None:
        inject_adapters(module, options, {} if traits is None else traits.parts)
    if quantizes and options.quantize is not None:
        if draws and contract.weights.pending is None and has_meta_tensors(module):
            raise ConfigError(
                f"--lora-quantize {options.quantize}: {as_trainable(module).name} starts from random weights; there is "
                "no base model to quantise"
            )
        quantize_base(module, frozen or torch.float32)
    if frozen is None:
        return
    is_kept = as_trainable(module).keeps_in_float32(frozen)
    for name, param in module.named_parameters():
        if not param.requires_grad and param.is_floating_point() and not is_kept(stored_name(name)):
            param.data = param.data.to(frozen)


def is_adapted(layer: nn.Module) -> bool:
    """Whether a module is PEFT's layer around one that has adapters."""
    return "base_layer" in layer._modules


def low_rank_parts(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a linear layer's adapter adds to its output, as factors: `low @ up.T`.

    Args:
        layer: PEFT's layer around it.
        x: [..., in], the layer's input.

    Returns:
        low [..., rank], A x times the adapter's factor, and up, this rank's part of B [out, rank].
    """
    down, up = layer.lora_A[ADAPTER], own_part(layer.lora_B[ADAPTER].weight)
    return down(layer.lora_dropout[ADAPTER](x.to(down.weight.dtype))) * layer.scaling[ADAPTER], up


@torch.no_grad()
def draw_adapters(model: nn.Module, options: LoraOptions, seed: int) -> None:
    """Give adapters the values before training: A at random, B zero, magnitudes those of the model's weights.

    The values depend on `seed` and on names in files, not on the layout. Of an embedding's adapter, A is zero and B is
    random. With init random, which is PEFT's `init_lora_weights=False`, A and B are both random. Source:
    `reset_lora_parameters` and `update_layer` of PEFT's LoraLayer.

    Args:
        model: with its own weights loaded, sharded or not.
    """
    plan = as_trainable(model).adapter_plan
    parameters = () if plan is None else plan.parameters
    for name, param in model.named_parameters():
        if not is_adapter(name) or "lora_magnitude_vector" in name:
            continue
        own_name = stored_name(name)
        shape = to_peft(own_name, torch.empty(param.shape, device="meta"), parameters).shape
        drawn = draw_adapter(own_name, shape, options, seed)
        copy_whole(param, from_peft(own_name, drawn, parameters, param.shape).to(param.dtype))
    if options.use_dora:
        _draw_magnitudes(model)


def draw_adapter(name: str, shape: Sequence[int], options: LoraOptions, seed: int) -> torch.Tensor:
    """Return the value before training of an adapter's tensor that is no magnitude, whole and in float32.

    Args:
        name: its name in files.
        shape: its whole shape in files.
        options: the run's.
        seed: the run's.
    """
    drawn, is_random = torch.zeros(tuple(shape)), options.init == "random"
    with seeded(seed, name):
        if name.endswith(".lora_embedding_B") or (is_random and name.endswith(".lora_embedding_A")):
            nn.init.normal_(drawn)
        elif ".lora_A." in name and options.init == "gaussian":
            nn.init.normal_(drawn, std=1 / options.r)
        elif ".lora_A." in name or (is_random and ".lora_B." in name):
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))
    return drawn


def _draw_magnitudes(model: nn.Module) -> None:
    """Set DoRA's magnitudes to the norms of the weights of each output: B is zero."""
    for name, magnitude in model.named_parameters():
        if "lora_magnitude_vector" not in name:
            continue
        layer = name.split(".lora_magnitude_vector")[0]
        base: Any = model.get_submodule(f"{layer}.base_layer")
        values: Any = base.weight.full_tensor() if hasattr(base.weight, "full_tensor") else base.weight
        of_outputs = values.T if isinstance(base, nn.Embedding) else values.flatten(1)
        norms = of_outputs.float().norm(dim=1)
        copy_whole(magnitude, norms.view(magnitude.shape).to(magnitude.device, magnitude.dtype))


class _Finder:
    """Finds the layers and parameters that words name."""

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[str, Sequence[str]],
        apply_to: Sequence[str],
        names: LayerNames,
    ) -> None:
        self._model, self._names, self._name = model, names, as_trainable(model).name.removeprefix("FSDP")
        self._modules = {path: m for path, m in model.named_modules() if path}
        self._head = as_trainable(model).output_layer
        self._paths = None if "all" in apply_to else _paths_of(apply_to, parts, self._name, self._modules)
        self._parts = parts

    def is_beside(self, path: str) -> bool:
        """Whether a path is outside of the parts that get adapters."""
        return self._paths is not None and not self._is_inside(path)

    def modules(self, word: str) -> tuple[list[str], str]:
        """Return the paths of the layers that a word names, and, if there are none, why."""
        if word == _ALL_LINEAR:
            found = [p for p, m in self._modules.items() if isinstance(m, nn.Linear) and m is not self._head]
            found = [path for path in found if self._is_inside(path)]
            return self._thawed(found), f"--lora-target-modules {word}: every linear layer of {self._name} is frozen"
        wanted = self._names.get(word, word)
        answers = [self._layers(word, own) for own in ((wanted,) if isinstance(wanted, str) else wanted)]
        return [path for paths, _ in answers for path in paths], answers[0][1]

    def _layers(self, word: str, wanted: str) -> tuple[list[str], str]:
        where = "--lora-target-modules"
        if "{" in wanted or wanted in self._modules:
            found = list(find_modules(self._model, [wanted], where=where))
            others = [path for path in found if not isinstance(self._modules[path], _LAYERS)]
            if others:
                kind = type(self._modules[others[0]]).__name__
                return [], f"{where} {word}: {others[0]} is a {kind}; expected a linear, convolution or embedding layer"
            return found, ""
        found = [p for p, m in self._modules.items() if _ends_with(p, wanted) and isinstance(m, _LAYERS)]
        inside = [path for path in found if self._is_inside(path)]
        if not found:
            return [], f"{where} {word}: no layer of {self._name} has this name{self._known(word)}"
        if not inside:
            return [], f"{where} {word}: {self._name} has such layers, but not in --lora-apply-modules"
        if not self._thawed(inside):
            return [], (
                f"{where} {word}: such layers are in frozen parts only ({inside[0]}, …); unfreeze the part in "
                "model.json, which LoRA keeps frozen but for adapters, or give their whole path"
            )
        return self._thawed(inside), ""

    def parameters(self, word: str) -> tuple[list[str], str]:
        """Return the names of the parameters that a word names, and, if there are none, why."""
        where = "--lora-target-parameters"
        named = {name: p for name, p in self._model.named_parameters() if self._is_inside(name)}
        found = [name for name in named if _ends_with(name, word)]
        if "{" in word:
            above, _, own = word.rpartition(".")
            modules = find_modules(self._model, [above], where=where)
            found = [join_paths(path, own) for path in modules if join_paths(path, own) in named]
        wrong = [name for name in found if named[name].dim() not in (2, 3)]
        if wrong:
            return [], f"{where} {word}: {wrong[0]} has {named[wrong[0]].dim()} dimensions; expected 2 or 3"
        of_layers = [n for n in found if isinstance(self._modules.get(n.rpartition(".")[0]), _LAYERS)]
        if of_layers:
            layer = of_layers[0].rpartition(".")[0]
            return [], f"{where} {word}: {of_layers[0]} is the weight of a layer; name {layer} in --lora-target-modules"
        near = nearest_names(word, {_tail(n, word.count(".") + 1) for n in named}, limit=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return found, f"{where} {word}: no parameter of {self._name} has this name{hint}"

    def saved(self, word: str) -> tuple[list[str], str]:
        """Return the paths of the modules that a word of --lora-modules-to-save names, and, if there are none, why."""
        where = "--lora-modules-to-save"
        if "{" in word or word in self._modules:
            return list(find_modules(self._model, [word], where=where)), ""
        found = [path for path in self._modules if _ends_with(path, word)]
        return found, f"{where} {word}: no module of {self._name} has this name{self._known(word)}"

    def _is_inside(self, path: str) -> bool:
        return self._paths is None or containing_path(path, self._paths) is not None

    def _thawed(self, paths: Iterable[str]) -> list[str]:
        return [p for p in paths if any(q.requires_grad for q in self._modules[p].parameters())]

    def _known(self, word: str) -> str:
        ends = [end for end in MEGATRON_LAYERS.get(word, ()) if any(_ends_with(path, end) for path in self._modules)]
        if ends:
            return f"; it is the Megatron backend's name: write {' '.join(ends)}"
        tails = dict.fromkeys(_tail(p, 1) for p, m in self._modules.items() if isinstance(m, _LAYERS))
        tails = dict.fromkeys(tail for tail in tails if not tail.isdigit())
        near = nearest_names(word, tails, limit=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        experts = {_tail(n, 3) for n, p in self._model.named_parameters() if p.dim() == 3 and _like(word, n)}
        if experts:
            hint += f"; its experts are single parameters: --lora-target-parameters {' '.join(sorted(experts))}"
        return f"{hint}; its layers: {', '.join(list(tails)[:12])}{', …' if len(tails) > 12 else ''}"


def _paths_of(
    apply_to: Sequence[str], parts: Mapping[str, Sequence[str]], name: str, modules: Iterable[str]
) -> list[str]:
    """Return the paths of parts; a word that is no part's name means the modules whose paths contain it."""
    paths: list[str] = []
    for part in apply_to:
        known = [path for own in _PARTS_OF.get(part, (part,)) for path in parts.get(own, ())]
        found = known or [path for path in modules if part in path]
        if not found:
            raise ConfigError(
                f"--lora-apply-modules {part}: {name} has no such part; it has: {', '.join(parts) or 'none'}, or all; "
                "nor does the path of any of its modules contain that"
            )
        paths += found
    return paths


def _collect(found: dict[str, None], find: Any, word: str) -> list[str]:
    try:
        paths, why = find(word)
    except ConfigError as error:
        return [str(error)]
    found.update(dict.fromkeys(paths))
    return [] if paths else [why]


@contextmanager
def _without_config(model: nn.Module) -> Iterator[None]:
    """Hide the configuration of a transformers model: by it PEFT exchanges experts of older layouts for parameters."""
    config = vars(model).pop("config", None)
    try:
        yield
    finally:
        if config is not None:
            vars(model)["config"] = config


def _ends_with(path: str, word: str) -> bool:
    return path == word or path.endswith(f".{word}")


def _tail(path: str, segments: int) -> str:
    return ".".join(path.split(".")[-segments:])


def _like(word: str, name: str) -> bool:
    """Whether a stacked parameter of experts holds the layers that a word names: `gate_proj` in `gate_up_proj`."""
    last = name.rpartition(".")[2]
    return set(word.rpartition(".")[2].split("_")) <= set(last.split("_"))


def _listed(names: Iterable[str]) -> str:
    """List names; those that differ in numbers only are listed once."""
    patterns: dict[str, int] = {}
    for name in names:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "{*}", name)
        patterns[pattern] = patterns.get(pattern, 0) + 1
    return ", ".join(p if number == 1 else f"{p} ({number})" for p, number in patterns.items())


def _beside(plan: AdapterPlan) -> str:
    return f", {len(plan.whole)} of them whole tensors" if plan.whole else ""
