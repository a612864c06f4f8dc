"""A model directory through sharded ranks and out again, in a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_and_export(
    model: dict[str, Any], wrap: list[str], folder: Path, sizes: dict[str, int] | None = None
) -> dict[str, tuple[int, ...]]:
    """Build on meta, shard, load the weights that model.json names, and export them.

    Args:
        model: model.json's content.
        wrap: paths of the units.
        folder: receives the export.
        sizes: of Dims, whose product is the number of ranks; None: all ranks shard.

    Returns:
        name → shape of this rank's part of each parameter.
    """
    import torch
    import torch.distributed as dist

    from mindspeed_mm.checkpoint import hf_export
    from mindspeed_mm.checkpoint.sources import open_weights
    from mindspeed_mm.checkpoint.weights import load_weights
    from mindspeed_mm.configs.dims import Dims
    from mindspeed_mm.models.common.build_context import BuildContext, build_context
    from mindspeed_mm.models.transformers_model import TransformersModel
    from mindspeed_mm.optimizer.clip import local_tensor
    from mindspeed_mm.parallel.world import start_world

    dims = Dims(**sizes) if sizes else None
    context = BuildContext(dims=dims, world=start_world("gloo", dims) if dims else None)
    with build_context(context):
        with torch.device("meta"):
            whole = TransformersModel(model)
        whole.weights_come_later = True
        whole.model.fsdp2_overrides = {"sub_modules_to_wrap": wrap, "sharding_size": "auto"}
        whole.fully_shard()
    source = open_weights(Path(whole.source))
    plan = load_weights(whole.model, source)
    conversions = plan.conversions if source.in_hub_layout else None
    hf_export.export(whole.model, folder, whole.source, dist.group.WORLD, whole.source_dtype, conversions)
    return {name: tuple(local_tensor(p).shape) for name, p in whole.model.named_parameters()}
