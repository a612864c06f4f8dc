"""Traits inferred for a transformers model that no family folder describes: its blocks, decoder and encoders.

The smallest input of an inferred encoder isn't known, so a batch that leaves it idle can't run it on a dummy. Such an
encoder stays in the root's unit instead, whose parameters every rank gathers anyway, and whose gradients are reduced
with zeros for ranks that have none. (Zeros are gradients: a step that leaves an encoder idle on all ranks still decays
its weights.) If fsdp2.yaml makes a block of such an encoder a unit, the encoder needs input in every micro-batch; a
micro-batch without input is refused before ranks wait for each other.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mindspeed_mm.models.common.family import FamilyTraits
from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.versions import installed_version

#: part → (key of its configuration, modalities)
_ENCODERS = {"vision_encoder": ("vision_config", ("image", "video")), "audio_encoder": ("audio_config", ("audio",))}


def block_lists(model: nn.Module) -> list[str]:
    """Return the paths of the module lists whose elements become one unit each, without lists inside such elements.

    transformers and diffusers name the classes of blocks; without these names, lists of one class are blocks.
    """
    lists = {path: m for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and list(m.parameters())}
    names = as_trainable(model).block_classes
    found = [path for path, blocks in lists.items() if any(type(block).__name__ in names for block in blocks)]
    if not found:
        found = [path for path, blocks in lists.items() if len(blocks) > 1 and len({type(b) for b in blocks}) == 1]
    return [path for path in found if not any(path.startswith(f"{outer}.") for outer in found)]


def default_wrap_list(model: nn.Module, traits: FamilyTraits) -> list[str]:
    """Return `sub_modules_to_wrap` for a file without it: all blocks except those of encoders that may be idle."""
    idle = tuple(f"{tower.path}." for tower in traits.towers if tower.run_dummy is None)
    return [f"{path}.{{*}}" for path in block_lists(model) if not path.startswith(idle)]


def traits_of(model: Any) -> FamilyTraits:
    """Return the traits that the model's class states (attribute `traits`), or traits inferred from the model."""
    return as_trainable(model).traits or infer_traits(model)


def infer_traits(model: Any) -> FamilyTraits:
    """Infer the parts of a model that no family describes; packed rows are refused, as their support isn't verified."""
    if not as_trainable(model).is_transformers:
        return FamilyTraits(parts={"text_decoder": ("",)})
    decoder, head = (_path(model, part) for part in (model.get_decoder(), model.get_output_embeddings()))
    encoders = {part: path for part in _ENCODERS if (path := _encoder(model, part, decoder)) is not None}
    if not encoders:
        return FamilyTraits(language_model=decoder or None, parts={"text_decoder": ("",)})
    known = [path for path in (decoder, head, *encoders.values()) if path]
    beside = _others(model, known)
    parts = {part: (path,) for part, path in encoders.items()} | {
        "text_decoder": tuple(p for p in (decoder, head) if p)
    }
    if len(encoders) > 1:
        beside = []  # their encoder can't be inferred
    elif "vision_encoder" in encoders:
        modules = dict(model.named_modules())
        parts["vision_projector"] = tuple(path for path in beside if path in modules)
    towers = tuple(Tower(path, _ENCODERS[part][1], (), None, tuple(beside)) for part, path in encoders.items())
    return FamilyTraits(parts=parts, towers=towers)


def guard_idle_encoders(model: nn.Module, traits: FamilyTraits) -> None:
    """Allow ranks to run different encoders; a forward pass refuses it where an encoder has units of its own.

    Args:
        model: the wrapped transformers model.
        traits: the model's traits.

    Raises:
        ConfigError: this release of torch can't reduce gradients of parameters that a rank hasn't used.
    """
    idle = [tower for tower in traits.towers if tower.run_dummy is None]
    if not idle or not isinstance(model, FSDPModule):
        return
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            f"torch {installed_version('torch')} is installed and torch >= 2.13 is needed to train a model with an "
            f"encoder ('{idle[0].path}') and without a family here: a rank whose rows have no input for the encoder "
            "would let the others wait; pip install 'torch>=2.13'"
        )
    model.set_reduce_scatter_unused_params(True, recurse=False)
    prefixes = tuple(path for tower in idle for path in (tower.path, *tower.beside))
    units = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, FSDPModule)
        and any(path == p or path.startswith(f"{p}.") for p in prefixes)
        and any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in module.parameters())
    }
    if units:
        _IdleUnits(units).install(model)


class _IdleUnits:
    """Refuses a forward pass that reaches the decoder without having run every unit of the encoders."""

    def __init__(self, units: dict[str, nn.Module]) -> None:
        self._units = units
        self._ran: set[int] = set()

    def install(self, model: Any) -> None:
        for unit in self._units.values():
            unit.register_forward_pre_hook(lambda module, args: self._ran.add(id(module)), prepend=True)
        model.get_decoder().register_forward_pre_hook(self._check, prepend=True)

    def _check(self, decoder: nn.Module, args: tuple[Any, ...]) -> None:
        ran, self._ran = self._ran, set()
        for path, unit in self._units.items():
            if id(unit) not in ran:
                raise DataError(
                    f"a micro-batch has no input for '{path}', which fsdp2.yaml's sub_modules_to_wrap makes a unit: "
                    "ranks with input would wait for this one; leave out sub_modules_to_wrap, or all that is in the "
                    "encoder (it then is in the root's unit), or let every micro-batch have such media"
                )


def _path(model: nn.Module, part: nn.Module | None) -> str:
    return next((path for path, module in model.named_modules() if module is part), "")


def _encoder(model: Any, part: str, decoder: str) -> str | None:
    """Return the path of the outermost module, outside of the decoder, whose configuration class is that of `part`."""
    config = getattr(model.config, _ENCODERS[part][0], None)
    for path, module in model.named_modules():
        is_beside = path and path != decoder and not path.startswith(f"{decoder}.")
        if config is not None and is_beside and type(getattr(module, "config", None)) is type(config):
            return path
    return None


def _others(model: nn.Module, known: list[str]) -> list[str]:
    """Return the paths of the largest modules (or parameters) that neither contain nor lie in one of `known`."""
    found: dict[str, None] = {}
    for name, _ in model.named_parameters():
        if any(name.startswith(f"{path}.") for path in known):
            continue
        parts = name.split(".")
        prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
        found[next(p for p in prefixes if not any(k.startswith(f"{p}.") for k in known))] = None
    return list(found)
