"""What --recompute-granularity full asks of FSDP2, where fsdp2.yaml doesn't say what is recomputed."""

from __future__ import annotations

from typing import Any

from torch import nn

from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.transformers.inferred import block_lists
from mindspeed_mm.parallel.recompute import apply_recompute
from mindspeed_mm.utils.log import notice


def recompute_blocks(root: nn.Module, config: Fsdp2Config, args: Any) -> None:
    """Recompute the blocks of `root` in backward as the flags say, before it is sharded.

    As in Megatron, `block` means the first --recompute-num-layers blocks of each list of them, and `uniform` all
    blocks. Each is recomputed by itself: the loop over the blocks is the model's own, so that several of them can't
    be recomputed from one stored input. An fsdp2.yaml with recompute_modules decides instead of the flags.

    Args:
        root: the unsharded model; values of parameters aren't needed.
        args: the run's flags.
    """
    if args.recompute_granularity != "full":
        return
    if config.recompute_modules is not None:
        notice("--recompute-granularity full has no effect here: fsdp2.yaml's recompute_modules decide")
        return
    number = args.recompute_num_layers if args.recompute_method == "block" else None
    blocks: dict[str, nn.Module] = {}
    named = []
    for path in block_lists(root):
        chosen = list(root.get_submodule(path).named_children())[:number]
        blocks |= {f"{path}.{name}": block for name, block in chosen}
        named.append(f"{path} ({len(chosen)} blocks)")
    if not blocks:
        notice(
            f"--recompute-granularity full has no effect here: {type(root).__name__} has no list of blocks; name what "
            "is to be recomputed in fsdp2.yaml's recompute_modules"
        )
        return
    notice(f"--recompute-granularity full: recomputed in backward are {', '.join(named)}")
    if args.recompute_method == "uniform" and (args.recompute_num_layers or 1) > 1:
        notice(
            f"--recompute-num-layers {args.recompute_num_layers}: with FSDP2 every block is recomputed by itself, from "
            "its own input"
        )
    # the reentrant way hides what is inside of blocks from whoever reads it there, routers from their loss for example
    apply_recompute(blocks, config.use_reentrant if "use_reentrant" in config.model_fields_set else False)
