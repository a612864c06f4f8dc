"""Training and evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from mindspeed_mm.utils.log import notice


@contextmanager
def evaluation_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which all modules are in evaluation mode; afterwards each module has its previous mode again.

    A frozen part that a user keeps in evaluation mode (no dropout, fixed batch statistics) thus stays in it. Modes are
    set through `train` and `eval`, since a module may override them to do more.
    """
    modules = [module for model in models for module in model.modules()]
    modes = [module.training for module in modules]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):  # parents come first
            if module.training != mode:
                module.train(mode)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode  # a module with two parents may have been changed again


def report_modules_trained_in_eval_mode(models: Sequence[nn.Module]) -> None:
    """Log which modules are trained although they are in evaluation mode, as models from `from_pretrained` are."""
    found = [
        name or type(module).__name__
        for model in models
        for name, module in model.named_modules()
        if not module.training and any(param.requires_grad for param in module.parameters(recurse=False))
    ]
    if found:
        others = f" and {len(found) - 1} more modules" if len(found) > 1 else ""
        notice(
            f"trained in evaluation mode, as model_provider returned them: {found[0]}{others}; their dropout is off, "
            "and recompute leaves them out (from_pretrained returns models so: call train() on what is meant to train)"
        )
