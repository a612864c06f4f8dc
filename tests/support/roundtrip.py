"""A model directory through sharded ranks and out again, in a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_and_export(model: dict[str, Any], wrap: list[str], folder: Path) -> None:
    """Build on meta, shard, load the weights that model.json names, and export them.

    Args:
        model: model.json's content.
        wrap: paths of the units.
        folder: receives the export.
    """
    import torch
    import torch.distributed as dist

    from mindspeed_mm.checkpoint import hf_export
    from mindspeed_mm.checkpoint.sources import open_weights
    from mindspeed_mm.checkpoint.weights import load_weights
    from mindspeed_mm.models.transformers_model import TransformersModel

    with torch.device("meta"):
        whole = TransformersModel(model)
    whole.weights_come_later = True
    whole.fsdp2_overrides = {"sub_modules_to_wrap": wrap, "sharding_size": "auto"}
    whole.fully_shard()
    source = open_weights(Path(whole.source))
    plan = load_weights(whole.model, source)
    conversions = plan.conversions if source.in_hub_layout else None
    hf_export.export(whole.model, folder, whole.source, dist.group.WORLD, whole.source_dtype, conversions)
