"""Activation recompute: of the modules that fsdp2.yaml names or, without any, of the blocks that the flags select.

The `forward` method of the module is replaced with a checkpointed one, so that module names, and with them state-dict
keys, stay those of the unmodified model. FSDP's hooks stay outside: parameters are gathered for the forward pass,
freed, and gathered again in backward before the recompute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.parallel.selective import Operation, kept_outputs
from mindspeed_mm.utils.log import notice


@dataclass(frozen=True)
class BlockRecompute:
    """Values of the recompute flags.

    Attributes:
        granularity: --recompute-granularity.
        method: --recompute-method: "block" or "uniform".
        num_layers: --recompute-num-layers.
        modules: --recompute-modules, the parts of blocks that granularity "selective" recomputes.
        blocks_that_keep_attention: how many of the recomputed blocks of each list, the first ones, don't run the
            kernel of attention again; None: none, 0: all.
    """

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ("core_attn",)
    blocks_that_keep_attention: int | None = None


def recompute_blocks(root: nn.Module, lists: Sequence[str], config: Fsdp2Config, asked: BlockRecompute) -> None:
    """Apply --recompute-granularity full to the blocks of `root`, before it is sharded; another one does nothing.

    As in Megatron, `block` selects the first --recompute-num-layers blocks of each list, and `uniform` all blocks. Each
    block is recomputed separately: the model's code loops over the blocks, so several of them can't be recomputed from
    one stored input. recompute_modules of fsdp2.yaml replaces the flags.

    Args:
        root: the unsharded model; it may be on the meta device.
        lists: paths of its lists of blocks.
        config: content of fsdp2.yaml.
        asked: the flags.
    """
    if asked.granularity != "full":
        return
    if config.recompute_modules is not None:
        notice("--recompute-granularity full has no effect here: fsdp2.yaml's recompute_modules decide")
        return
    blocks = chosen_blocks(root, lists, config, asked)
    named = [f"{path} ({sum(block.startswith(f'{path}.') for block in blocks)} blocks)" for path in lists]
    if not blocks:
        notice(
            f"--recompute-granularity full has no effect here: {type(root).__name__} has no list of blocks; name what "
            "is to be recomputed in fsdp2.yaml's recompute_modules"
        )
        return
    notice(f"--recompute-granularity full: recomputed in backward are {', '.join(named)}")
    if asked.method == "uniform" and (asked.num_layers or 1) > 1:
        notice(
            f"--recompute-num-layers {asked.num_layers}: with FSDP2 every block is recomputed by itself, from its own "
            "input"
        )
    # reentrant checkpointing detaches values that are read from inside of blocks, for example router logits for a loss
    reentrant = config.use_reentrant if "use_reentrant" in config.model_fields_set else False
    keeping = _that_keep_attention(blocks, lists, asked.blocks_that_keep_attention)
    for path, block in blocks.items():
        keep: set[Operation] = {*config.recompute_keep, "attention"} if path in keeping else {*config.recompute_keep}
        apply_recompute({path: block}, reentrant, keep)


def _that_keep_attention(blocks: Collection[str], lists: Sequence[str], number: int | None) -> set[str]:
    if number is None:
        return set()
    of_lists = [[path for path in blocks if path.startswith(f"{at}.")] for at in lists]
    return {path for paths in of_lists for path in (paths[:number] if number else paths)}


def chosen_blocks(
    root: nn.Module, lists: Sequence[str], config: Fsdp2Config, asked: BlockRecompute
) -> dict[str, nn.Module]:
    """Return the blocks, by path, that `recompute_blocks` recomputes; arguments are the same."""
    if asked.granularity != "full" or config.recompute_modules is not None:
        return {}
    number = asked.num_layers if asked.method == "block" else None
    return {
        f"{path}.{name}": block
        for path in lists
        for name, block in list(root.get_submodule(path).named_children())[:number]
    }


def apply_recompute(modules: Mapping[str, nn.Module], use_reentrant: bool, keep: Collection[Operation] = ()) -> None:
    """Discard the activations of each of `modules` in forward and recompute them in backward.

    Args:
        modules: path → module, for example from `expand_patterns`.
        use_reentrant: use torch's reentrant checkpoint implementation. It computes no gradient for a block if none of
            its inputs requires one (a frozen embedding before it); such a call is run non-reentrant, with one notice.
        keep: operations whose outputs are kept; with any, the implementation is the non-reentrant one.
    """
    if keep:
        use_reentrant = False
    for path, module in modules.items():
        if getattr(module, "_mm_recomputed", False):
            continue
        module.forward = _recomputed(module, module.forward, use_reentrant, path, keep)  # type: ignore[method-assign]
        module._mm_recomputed = True  # type: ignore[assignment]


def _recomputed(
    module: nn.Module, forward: Callable[..., Any], use_reentrant: bool, path: str, keep: Collection[Operation]
) -> Callable[..., Any]:
    contexts = {"context_fn": kept_outputs(keep)} if keep else {}

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not module.training:
            return forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        reentrant = use_reentrant
        if reentrant and not any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
            if any(p.requires_grad for p in module.parameters()):
                notice(
                    f"use_reentrant: true would give '{path}' and similar modules no gradient, as none of their inputs "
                    "needs one (a frozen module below them): they are recomputed with use_reentrant: false",
                    key=f"reentrant {type(module).__name__}",
                )
            reentrant = False
        if not reentrant:
            return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

        # the reentrant implementation takes positional tensors only: pass the flat leaves
        def from_leaves(*flat: Any) -> Any:
            inner_args, inner_kwargs = tree_unflatten(flat, spec)
            return forward(*inner_args, **inner_kwargs)

        return checkpoint(from_leaves, *leaves, use_reentrant=True)

    return run
