"""Parameter groups: parameters that share a learning rate and a weight decay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from mindspeed_mm.utils.errors import ConfigError, did_you_mean

ParamGroup = dict[str, Any]
"""A parameter group of torch's optimizers."""

IsIdle = Callable[[Sequence[str]], bool]
"""Whether the tower that encodes these modalities had no input in a step's global batch."""


def build_param_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    no_decay_names: Sequence[str] = (),
    scaled_names: Sequence[str] = (),
    lr_mult: float = 1.0,
    known_names: Iterable[str] | None = None,
    matrices: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Sort trainable parameters into optimizer groups.

    Parameters of dimension <= 1 (biases, norms) and those that `no_decay_names` selects have no weight decay. The
    learning rate of parameters that `scaled_names` selects is multiplied by `lr_mult`.

    Args:
        no_decay_names, scaled_names: substrings of parameter names, case-insensitive
            (--weight-decay-exclude-modules, --lr-scale-modules).
        known_names: names of all trainable parameters of the model; needed if `named_parameters` are only some of them.
        matrices: names of the parameters that Muon orthogonalises; None: another optimizer.

    Returns:
        groups with `params`, `names`, `wd_mult` (0 or 1) and `lr_mult`; for Muon with `orthogonalized` too.

    Raises:
        ConfigError: a substring matches no trainable parameter, or nothing is trainable.
    """
    named = [(name, p) for name, p in named_parameters if p.requires_grad]
    names = [name for name, _ in named] if known_names is None else list(known_names)
    if not names:
        raise ConfigError("no parameter is trainable: every part is frozen")
    for flag, asked in (("--weight-decay-exclude-modules", no_decay_names), ("--lr-scale-modules", scaled_names)):
        for wanted in asked:
            if not any(wanted.lower() in name.lower() for name in names):
                parts = {part for name in names for part in name.split(".") if not part.isdigit()}
                raise ConfigError(
                    f"{flag} {wanted}: no trainable parameter has this in its name{did_you_mean(wanted, parts)}"
                )
    groups: dict[Any, dict[str, Any]] = {}
    for name, param in named:
        decays = param.dim() > 1 and not _matches(name, no_decay_names)
        own: dict[str, Any] = {"orthogonalized": name in matrices} if matrices is not None else {}
        own |= {"wd_mult": 1.0 if decays else 0.0, "lr_mult": lr_mult if _matches(name, scaled_names) else 1.0}
        # a kernel takes tensors of one device (offload_to_cpu leaves some of them in host memory) and dtype
        group = groups.setdefault((*own.values(), param.device, param.dtype), {"params": [], "names": [], **own})
        group["params"].append(param)
        group["names"].append(name)
    return list(groups.values())


def is_idle(modalities: Sequence[str], media: Mapping[str, int]) -> bool:
    """Whether the tower that encodes `modalities` had no input in a global batch with these numbers of `media`.

    Without modalities, or with a modality that is not counted, the result is False.
    """
    return bool(modalities) and all(m in media for m in modalities) and not any(media[m] for m in modalities)


def _matches(name: str, wanted: Sequence[str]) -> bool:
    return any(w.lower() in name.lower() for w in wanted)
