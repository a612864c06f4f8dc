"""Values of a micro-batch that the model's code reads on the host, and what follows from them for its towers.

transformers' models read grids of images, lengths and the like while a forward pass is launched. On a device each such
read would wait for all that the device was given before. So these values stay in host memory, and what the towers
compute from them is computed beforehand, in the places that `transformers.vision_utils` has for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.common.idle_tower import Tower
from mindspeed_mm.utils.device import OnHost, host_value

TOWER_INPUTS = "tower_inputs"
"""Key of a prepared micro-batch: name of a field with grids → keyword arguments of the tower that encodes them."""


class HostInputs:
    """Gives a model the values that stay on the host, and its towers what was computed from them.

    FSDP moves the arguments of its root to the device, and casts those of its units: the hooks here run after its own.
    """

    def __init__(self, model: nn.Module, towers: Iterable[Tower]) -> None:
        """
        Args:
            model: the transformers model, not wrapped yet.
            towers: its encoders.
        """
        self._values: dict[str, Any] = {}
        self._of_grids: list[tuple[torch.Tensor, Mapping[str, Any]]] = []
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        for path in {tower.path for tower in towers if tower.grid_inputs is not None}:
            model.get_submodule(path).register_forward_pre_hook(self._before_tower, with_kwargs=True)

    def for_batch(self, batch: dict[str, Any]) -> None:
        """Take the values that stay on the host, and the towers' arguments, out of the next forward's micro-batch."""
        self._values = {key: batch.pop(key).value for key in list(batch) if isinstance(batch[key], OnHost)}
        arguments = batch.pop(TOWER_INPUTS, {})
        self._of_grids = [
            (self._values[name], {key: host_value(value) for key, value in given.items()})
            for name, given in arguments.items()
        ]

    def _before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        values, self._values = self._values, {}
        return args, {**kwargs, **values}

    def _before_tower(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        grid = kwargs.get("grid_thw")
        # the grids themselves are compared: a tower may run again in backward, or on other media
        given = next((given for known, given in self._of_grids if known is grid), {})
        return args, {**kwargs, **given}


def keep_grids(model: Any, batch: dict[str, Any], towers: Iterable[Tower]) -> None:
    """Let the grids of a prepared micro-batch stay on the host, and add the towers' arguments that follow from them.

    Args:
        model: the transformers model; its weights aren't needed.
        batch: changed in place.
        towers: the model's encoders.
    """
    arguments: dict[str, dict[str, Any]] = {}
    shards = batch.get("media_shards", {})
    for tower in towers:
        for name in tower.grids:
            if tower.grid_inputs is None or not isinstance(grid := batch.get(name), torch.Tensor):
                continue
            own, shard = grid, shards.get(tower.path)
            if shard is not None and shard.grid is not None:
                own, shards[tower.path] = shard.grid, replace(shard, grid=None)
            arguments[name] = {"grid_thw": OnHost(own), **tower.grid_inputs(model.config.vision_config, own)}
            batch[name] = OnHost(grid)
    if arguments:
        batch[TOWER_INPUTS] = arguments
