"""Context parallelism: ranks split the tokens of the same rows, without a change to the model's code.

A hook in front of the language model cuts its inputs, when images are in them already, to the tokens of this rank. All
layers but attention work on single tokens. Attention is a function registered with transformers, which exchanges heads
for tokens (Ulysses), and if there is a ring, keys and values. The layers hand the shard to it as a keyword argument, so
a block that is recomputed in backward sees the one of its forward pass.

Every rank computes the loss of its own targets, and gradients are summed over ranks: no scale factor is needed.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.parallel_checks import attention_in_ring, heads_over_ulysses
from mindspeed_mm.configs.sections import raise_all
from mindspeed_mm.parallel.collectives import heads_to_sequence, sequence_to_heads
from mindspeed_mm.parallel.ring import ring_attention
from mindspeed_mm.parallel.sequence import SequencePlace, SequenceShard
from mindspeed_mm.parallel.world import RankSet, World
from mindspeed_mm.utils.errors import ConfigError, DataError

ATTENTION = "context_parallel"
"""The name of the attention function, in the place of the model's own implementation."""
_KEYWORD = "context_parallel"
_FLAG = "--context-parallel-size"


class ContextParallel:
    """Cuts the inputs of a language model to this rank's tokens, and computes attention over those of all ranks."""

    def __init__(self, language_model: nn.Module, name: str, dims: Dims) -> None:
        """Check that the model's attention can be split; nothing is changed before `install`.

        Args:
            language_model: receives `input_ids` or `inputs_embeds` by name; its decoder layers are `layers`. It may be
                on the meta device.
            name: class of the model, for messages.
            dims: sizes of the parallelisms.

        Raises:
            ConfigError: its heads can't be split, or its attention isn't what the ring computes.
        """
        self._language_model, self._name, self._dims = language_model, name, dims
        self._config: Any = language_model.config
        self._implementation: str = self._config._attn_implementation
        self._shard: SequenceShard | None = None
        self._world: World | None = None
        self._is_checked = self._is_counted = self._is_off = False
        check_attention(self._config, name, dims)
        if self._implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
            raise ConfigError(
                f"{_FLAG} {dims.cp}: {name} has attention '{self._implementation}', for which transformers makes no "
                "masks; set attn_implementation: sdpa in model.json"
            )

    @property
    def world(self) -> World:
        """The processes, after `install`."""
        assert self._world is not None, "install() comes first"
        return self._world

    @property
    def is_off(self) -> bool:
        """Whether the model has whole rows, and its own attention, on every rank."""
        return self._is_off

    @is_off.setter
    def is_off(self, value: bool) -> None:
        self._is_off = value
        self._config._attn_implementation = self._implementation if value else ATTENTION

    def install(self, world: World) -> None:
        """Put hook and attention function in place.

        To be called before the model is wrapped, so that the hook runs behind FSDP's, with parameters gathered.
        """
        self._world = world
        self._masked_config = copy.deepcopy(self._config)
        self._config._attn_implementation = ATTENTION
        self._language_model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._language_model.register_forward_hook(self._after)

    def shard_of(self, documents: torch.Tensor) -> SequenceShard:
        """Find this rank's part of a micro-batch, on the host.

        Args:
            documents: [batch, sequence] int64, number of each position's document within its row, 0 for padding.
        """
        ring, ulysses = self.world.ring, self.world.ulysses
        return SequenceShard.of(documents, SequencePlace(ring.size, ring.rank, ulysses.size, ulysses.rank))

    def for_batch(self, shard: SequenceShard, input_ids: torch.Tensor) -> None:
        """Set the shard of the next forward of the model; at the first call a collective.

        Args:
            shard: of the micro-batch.
            input_ids: [batch, sequence], the whole rows.

        Raises:
            DataError: the ranks that share the tokens of a row were given different rows.
        """
        self._shard = shard
        if not self._is_checked and self.world.context.size > 1:
            _check_same_rows(input_ids, self.world.context)
        self._is_checked = True

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self._is_off:
            return args, kwargs
        shard, self._shard = self._shard, None
        if shard is None:
            raise DataError(f"a micro-batch came to {self._name} without its shard; call prepare() first")
        if args:
            raise ConfigError(
                f"{_FLAG} {self._dims.cp}: {self._name} calls its language model with arguments by position, which "
                f"can't be cut; set {_FLAG} 1"
            )
        self._call = ContextCall(self, shard)
        return args, {**_cut(shard, kwargs), "attention_mask": None, _KEYWORD: self._call}

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_off:
            return
        found, expected = self._call.attended, len(self._language_model.layers)  # type: ignore[arg-type]
        del self._call
        if not self._is_counted and found != expected:
            raise ConfigError(
                f"{_FLAG} {self._dims.cp}: {found} of the {expected} decoder layers of {self._name} called the "
                f"attention function that sees the tokens of all ranks; the others would see this rank's only. Set "
                f"{_FLAG} 1"
            )
        self._is_counted = True


class ContextCall:
    """What the layers of one forward pass share: the shard, and the masks that were made of it.

    Attributes:
        attended: number of calls of the attention function.
    """

    def __init__(self, context: ContextParallel, shard: SequenceShard) -> None:
        self.shard, self.world = shard, context.world
        self._config, self.attended = context._masked_config, 0
        self._masks: dict[int | None, Any] = {}

    @property
    def config(self) -> Any:
        """The language model's configuration, with the attention implementation that was chosen for it."""
        return self._config

    def mask(self, query: torch.Tensor, window: int | None) -> Any:
        """Return transformers' own mask of the whole rows for the model's own attention implementation.

        Args:
            query: [batch, heads, sequence, head size].
            window: tokens that a sliding window sees; None: all tokens before.
        """
        if window not in self._masks:
            documents, like = self.shard.documents, query.new_empty(query.shape[0], query.shape[2], 0)
            apart = None if documents is None else packed_sequence_mask_function(documents)
            no_mask = no_cache = None  # by place: releases of transformers name the cache differently
            given = (self.config, like, no_mask, no_cache)
            if window is None:
                self._masks[window] = create_causal_mask(*given, and_mask_function=apart)
            else:
                config = copy.copy(self.config)
                config.sliding_window = window
                self._masks[window] = create_sliding_window_causal_mask(config, *given[1:], and_mask_function=apart)
        return self._masks[window]

    def boundaries(self) -> dict[str, Any]:
        """Return the documents' boundaries as flash attention takes them; of other implementations nothing."""
        lengths, longest = self.shard.cumulative_lengths, self.shard.longest
        if lengths is None or not is_flash_attention_requested(self.config):
            return {}
        given = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
        return {**given, "max_length_q": longest, "max_length_k": longest}


@torch.compiler.disable  # collectives, and a shard of this length
def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    context_parallel: ContextCall | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of this rank's tokens over those of all ranks; an attention function of transformers.

    Args:
        module: the attention layer.
        query: [batch, heads, local, head size].
        key: [batch, key-value heads, local, head size].
        value: [batch, key-value heads, local, value head size].
        attention_mask: not used: the mask is made of the shard.
        scaling: of the scores; None: head size ** -0.5.
        sliding_window: tokens that a query sees; None: all before it.
        s_aux: [heads], attention sinks.
        context_parallel: of this forward pass.
        kwargs: dropout and so on, as the layer's own attention function takes them.

    Returns:
        [batch, local, heads, value head size], and no weights.
    """
    call = context_parallel
    if call is None:
        raise ConfigError(
            f"{_FLAG}: {type(module).__name__} doesn't pass on the keyword arguments of its model, so its attention "
            f"can't know the tokens of other ranks; set {_FLAG} 1"
        )
    call.attended += 1
    ulysses = call.world.ulysses
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if ulysses.size > 1:
        key, value = _shareable(key, query.shape[1], ulysses.size), _shareable(value, query.shape[1], ulysses.size)
        query, key, value = heads_to_sequence(ulysses, query, key, value)
        s_aux = None if s_aux is None else s_aux.chunk(ulysses.size)[ulysses.rank]
    if call.world.ring.size > 1:
        output = ring_attention(
            query,
            key,
            value,
            chunks=call.shard.chunks,
            ring=call.world.ring,
            scale=scaling,
            window=sliding_window,
            sinks=s_aux,
        )
    else:
        output = _attend_to_whole_rows(module, call, query, key, value, scaling, sliding_window, s_aux, kwargs)
    (output,) = sequence_to_heads(ulysses, output)
    return output.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)


def _attend_to_whole_rows(
    module: nn.Module,
    call: ContextCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None,
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """The model's own attention function, on whole rows with a part of the heads → [batch, heads, sequence, size]."""
    own = sys.modules[type(module).__module__]
    implementation = call.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, vars(own).get("eager_attention_forward"))
    seen: dict[str, Any] = {"config": call.config, "num_key_value_groups": query.shape[1] // key.shape[1]}
    optional = {"sliding_window": window, "s_aux": sinks, **call.boundaries()}
    if sinks is not None:
        seen["sinks"] = sinks
    given = {**kwargs, **{name: given for name, given in optional.items() if given is not None}}
    mask = call.mask(query, window)
    output, _ = function(_PartOfHeads(module, seen), query, key, value, mask, scaling=scaling, **given)
    return output.transpose(1, 2)


class _PartOfHeads:
    """A view of an attention layer with other values of what concerns a part of its heads."""

    def __init__(self, layer: nn.Module, seen: Mapping[str, Any]) -> None:
        self.__dict__.update(seen)
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _shareable(heads: torch.Tensor, queries: int, ranks: int) -> torch.Tensor:
    """Repeat key-value heads until their number can be divided by that of ranks, and divides that of query heads."""
    count = heads.shape[1]
    if count % ranks == 0:
        return heads
    times = ranks // math.gcd(count, ranks)
    return heads.repeat_interleave(times if queries % (count * times) == 0 else queries // count, dim=1)


def _cut(shard: SequenceShard, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Cut every argument of the language model that has a value for each token."""
    shape = (len(shard.index), shard.length)
    mask = kwargs.get("visual_pos_masks")
    cut = {
        name: shard.cut(value, 1) if isinstance(value, torch.Tensor) and value.shape[:2] == shape else value
        for name, value in kwargs.items()
        if name not in ("position_ids", "attention_mask")
    }
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(shard.length, device=shard.index.device).unsqueeze(0)
    cut["position_ids"] = shard.cut(positions, -1)
    if mask is not None:
        # the features of images for the first layers: one row for each True
        rows = (mask.flatten().cumsum(0) - 1).view(mask.shape)
        own = shard.cut(rows, 1)[cut["visual_pos_masks"]]
        cut["deepstack_visual_embeds"] = [
            features.index_select(0, own) for features in kwargs["deepstack_visual_embeds"]
        ]
    return cut


def _check_same_rows(input_ids: torch.Tensor, context: RankSet) -> None:
    """Compare the rows of all ranks by a checksum: attention over parts of different rows would be silent."""
    places = torch.arange(1, input_ids.numel() + 1, device=input_ids.device)
    own = (input_ids.flatten() * places).sum() * 31 + input_ids.shape[1]
    ends = torch.stack([own, -own])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=context.group)
    if ends[0] != -ends[1]:
        raise DataError(
            f"the {context.size} context-parallel ranks, which split the tokens of the same rows, were given different "
            "ones; a data provider deals rows out by get_args().data_parallel_rank and data_parallel_size, not by the "
            "rank of the process"
        )


def check_attention(config: Any, name: str, dims: Dims) -> None:
    """Refuse attention that can't be split over ranks as the sizes state.

    Args:
        config: of the language model.
        name: class of the model, for messages.

    Raises:
        ConfigError: with the nearest sizes.
    """
    where = f"{_FLAG} {dims.cp}: {name}"
    problems = heads_over_ulysses(where, config.num_attention_heads, dims)
    for key, what in (("attention_dropout", "dropout"), ("attn_logit_softcapping", "a cap of its scores")):
        problems += attention_in_ring(f"{where}: config.json's {key}", what, getattr(config, key, None), dims)
    raise_all(problems)
