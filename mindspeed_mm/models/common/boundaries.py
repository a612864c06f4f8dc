"""Separation of the samples of a packed row in transformers' attention, and a check of it.

transformers finds the samples by restarting positions, unless it is given their boundaries. A failure there would be
silent, so the first packed batch is checked in front of the first layer of each type.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils.generic import is_flash_attention_requested

from mindspeed_mm.models.common.packed import PACKING_KEY, run_lengths
from mindspeed_mm.utils.errors import ConfigError


@dataclass
class PackedRows:
    """The sample boundaries of a packed micro-batch, for attention.

    Attributes:
        cumulative_lengths: [samples + 1] int32, over the flattened rows; padding counts as a sample.
        lengths: number of tokens of each sample, over the flattened rows.
        longest: number of tokens of the longest sample.
        boundary: (row, position) where a sample begins after another one; None: there is no such place.
    """

    cumulative_lengths: torch.Tensor
    lengths: tuple[int, ...]
    longest: int
    boundary: tuple[int, int] | None

    @classmethod
    def of(cls, documents: torch.Tensor) -> PackedRows:
        """Compute the boundaries for `documents` [batch, sequence] int64, on the host."""
        rows = run_lengths(documents)
        lengths = tuple(length for row in rows for length in row)
        boundary = next(((number, row[0]) for number, row in enumerate(rows) if len(row) > 1), None)
        return cls(torch.tensor([0, *lengths]).cumsum(0).int(), lengths, max(lengths, default=0), boundary)


class SampleBoundaries:
    """Passes a packed batch's boundaries to flash attention, and checks once that attention respects them."""

    def __init__(self, language_model: nn.Module, name: str, only: str | None = None) -> None:
        """
        Args:
            language_model: receives `inputs_embeds`; its decoder layers are `layers`.
            name: name of the model, for messages.
            only: the type of layers that is checked; None: all.
        """
        self._name, self._only = name, only
        self._config: Any = language_model.config
        self._rows: PackedRows | None = None
        self._current: PackedRows | None = None
        language_model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        layers: Any = language_model.layers
        types = getattr(self._config, "layer_types", None) or [None]
        self._unchecked: set[str | None] = set()
        for kind, layer in zip(types, layers):
            if kind not in self._unchecked and only in (None, kind):
                self._unchecked.add(kind)
                check = functools.partial(self._before_layer, kind)
                layer.register_forward_pre_hook(check, with_kwargs=True)

    def for_batch(self, rows: PackedRows | None) -> None:
        """Set the boundaries for the next forward of the model; None: its rows aren't packed."""
        self._rows = rows

    def check_implementation(self) -> None:
        """Check, before training, that transformers' mask for a row of two samples separates them.

        Raises:
            ConfigError: the attention implementation gets no mask that separates them.
        """
        from transformers.masking_utils import create_causal_mask

        if self._only is not None or is_flash_attention_requested(self._config):
            return
        no_mask = no_cache = None  # positional: releases of transformers name the cache differently
        positions = torch.tensor([[0, 1, 0, 1]])
        mask = create_causal_mask(self._config, torch.zeros(1, 4, 1), no_mask, no_cache, position_ids=positions)
        if not _separates(mask, 0, 2):
            raise self._refusal("gets no mask that separates the samples of a row")

    def _before_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        self._current, self._rows = self._rows, None
        rows = self._current
        if rows is not None and is_flash_attention_requested(self._config):
            # flash attention recognises restarting positions only in batches of one row
            lengths, longest = rows.cumulative_lengths, rows.longest
            given = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
            kwargs = {**kwargs, **given, "max_length_q": longest, "max_length_k": longest}
        return args, kwargs

    def _before_layer(self, kind: str | None, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = self._current
        if kind not in self._unchecked or rows is None or rows.boundary is None:
            return
        mask = kwargs.get("attention_mask")
        if isinstance(mask, PackedRows) or kind == "linear_attention":
            separated = mask is rows
        elif is_flash_attention_requested(self._config):
            separated = mask is None and kwargs.get("cu_seq_lens_q") is not None
        else:
            separated = _separates(mask, *rows.boundary)
        if not separated:
            raise self._refusal("lets the samples of a packed row see each other: its layers get no mask against it")
        self._unchecked.discard(kind)

    def _refusal(self, what: str) -> ConfigError:
        implementation = self._config._attn_implementation
        return ConfigError(
            f"{self._name} with attention '{implementation}' {what}; set {PACKING_KEY}, or attn_implementation: "
            "sdpa in model.json"
        )


def _separates(mask: Any, row: int, start: int) -> bool:
    """Whether a mask lets the token at `start` attend to itself, but not to the token before it."""
    if mask is None:
        return False
    if isinstance(mask, torch.Tensor):
        row = row if len(mask) > 1 else 0
        seen = mask[row, 0, start, start - 1 : start + 1]
        seen = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
        return seen.tolist() == [False, True]
    asked = [torch.tensor(value, device=mask.kv_num_blocks.device) for value in (row, 0, start, start - 1)]
    return not bool(mask.mask_mod(*asked)) and bool(mask.mask_mod(*asked[:3], asked[2]))
