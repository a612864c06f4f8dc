"""Placeholder tokens of media, found on the host, so that filling them doesn't wait for the device.

transformers fills them by a mask: it counts the mask on the host to compare it with the features, and the gradient of a
scatter by a mask counts it again, as does every decoder layer that adds features to the same tokens. Here the places
are known beforehand; the mask that the model asks for carries them, and is an index wherever the model uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mindspeed_mm.utils.errors import DataError

PLACES = "media_places"
"""Key of a prepared micro-batch: kind of media → int64 [n], its places in the flattened [batch * sequence] tokens."""


class PlaceMask(torch.Tensor):
    """A mask [batch, sequence] or [batch, sequence, 1] of bools with `places`, the indexes of its True rows.

    `embeddings.masked_scatter(mask, features)`, `hidden[mask, :]` and `hidden[mask, :] = rows` use the indexes; every
    other function gets a plain mask.
    """

    places: torch.Tensor

    @classmethod
    def of(cls, mask: torch.Tensor, places: torch.Tensor) -> PlaceMask:
        """Let a mask carry its places: int64 [n], on its device."""
        found = mask.as_subclass(cls)
        found.places = places
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """See the class."""
        kwargs = kwargs or {}
        if func is torch.Tensor.masked_scatter and isinstance(args[1], cls):
            return _filled(args[0], args[1].places, args[2])
        index = args[1] if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) else None
        if isinstance(index, tuple) and len(index) == 2 and isinstance(index[0], cls) and index[1] == slice(None):
            rows = args[0].flatten(0, 1)
            if func is torch.Tensor.__getitem__:
                return rows.index_select(0, index[0].places)
            args[0].view_as(args[0]).view(rows.shape).index_copy_(0, index[0].places, args[2])
            return None
        keeps = (func is torch.Tensor.__getitem__ and index == (..., 0)) or func is torch.Tensor.to
        plain = tree_map_only(cls, lambda mask: mask.as_subclass(torch.Tensor), (args, kwargs))
        result = func(*plain[0], **plain[1])
        return cls.of(result, args[0].places) if keeps and isinstance(args[0], cls) else result


def _filled(embeddings: torch.Tensor, places: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    rows = embeddings.flatten(0, -2)
    features = features.reshape(-1, rows.shape[1])
    if len(features) != len(places):
        raise DataError(
            f"a micro-batch has {len(places)} placeholder tokens for {len(features)} features of its media; media and "
            "placeholders of its rows don't belong together"
        )
    return rows.index_copy(0, places, features).view_as(embeddings)


class KnownPlaces:
    """Gives a model's placeholder masks the places that were found on the host; `for_batch` announces each batch."""

    def __init__(self, model: Any, kinds: Sequence[str]) -> None:
        """Replace the method that makes the masks.

        Args:
            model: the transformers model.
            kinds: see `FamilyTraits.placeholders`.
        """
        self._places: Mapping[str, torch.Tensor] = {}
        self._kinds, config = tuple(kinds), model.model.config
        self._tokens: dict[str, int] = {kind: attrgetter(f"{kind}_token_id")(config) for kind in kinds}
        self._own = model.model.get_placeholder_mask
        model.model.get_placeholder_mask = self._masks
        model.register_forward_hook(self._forget, always_call=True)

    def find(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the places of a micro-batch's placeholder tokens, on the host."""
        ids = batch["input_ids"].flatten()
        return {kind: (ids == token).nonzero().squeeze(1) for kind, token in self._tokens.items()}

    def for_batch(self, batch: dict[str, Any]) -> None:
        """Take the places out of the next forward's micro-batch; without them the model finds the tokens itself."""
        self._places = batch.pop(PLACES, {})

    def _masks(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor, *args: Any, **features: Any) -> Any:
        if input_ids is None or not self._places:
            return self._own(input_ids, inputs_embeds, *args, **features)
        masks = tuple(
            PlaceMask.of((input_ids == self._tokens[kind]).unsqueeze(-1), self._places[kind]) for kind in self._kinds
        )
        return masks if len(masks) > 1 else masks[0]

    def _forget(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self._places = {}
