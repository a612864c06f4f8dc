"""The parts of a model's blocks, by the names that transformers and diffusers give their classes and attributes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, TypeAlias

from torch import nn

from mindspeed_mm.models.transformers.inferred import block_lists

BlockPart: TypeAlias = Literal["attention", "mlp", "moe", "norm"]

_ATTENTION = re.compile(r"(\w+_)?attn\d*")


def _is_attention(name: str, module: nn.Module) -> bool:
    return "Attention" in type(module).__name__ or (
        _ATTENTION.fullmatch(name) is not None and not _is_norm(name, module)
    )


def has_experts(module: nn.Module) -> bool:
    """Whether a module, or one in it, is named after experts."""
    return any("expert" in part for path, _ in module.named_modules() for part in path.split("."))


def _is_mlp(name: str, module: nn.Module) -> bool:
    kind = type(module).__name__.lower()
    return ("mlp" in kind or "feedforward" in kind) and not has_experts(module)


def _is_moe(name: str, module: nn.Module) -> bool:
    return any("expert" in child for child, _ in module.named_children())


def _is_norm(name: str, module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


_TESTS: dict[BlockPart, Callable[[str, nn.Module], bool]] = {
    "attention": _is_attention,
    "mlp": _is_mlp,
    "moe": _is_moe,
    "norm": _is_norm,
}


def block_parts(root: nn.Module, part: BlockPart) -> dict[str, nn.Module]:
    """Return the parts of one kind that the blocks of a model have, by path.

    Args:
        root: the model; it may be on the meta device.
        part: "attention", "mlp" (dense ones), "moe" (experts with their router) or "norm" (children of a block, not
            those inside of its attention).
    """
    found: dict[str, nn.Module] = {}
    for path in block_lists(root):
        for name, block in root.get_submodule(path).named_children():
            _collect(f"{path}.{name}", block, part, found)
    return found


def _collect(path: str, module: nn.Module, part: BlockPart, found: dict[str, nn.Module]) -> None:
    """Add the outermost parts of a kind in a module."""
    for name, child in module.named_children():
        at = f"{path}.{name}"
        if _TESTS[part](name, child) and any(True for _ in child.parameters()):
            found[at] = child
        elif not (_is_attention(name, child) or _is_moe(name, child)):
            _collect(at, child, part, found)
