"""Attention within documents as one operator, for compiled blocks: a graph holds none of the documents' lengths.

What is computed, and by which kernel, is `document_attention`'s. Where documents are comes as a tensor, which is read
once for all layers and passes that share it; a graph takes it for any other input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.attention import AttentionWithin, Documents


class Readings:
    """The documents in tensors that are still in use."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int, Documents]] = {}

    def of(self, places: Tensor) -> Documents:
        """Return the documents that a tensor states; it is read once.

        In inference mode, where nothing tells whether a tensor has changed, each call reads it.

        Args:
            places: offsets [sequences + 1] of sequences in one row, or `Documents.runs` [runs, 3]; integers.
        """
        if places.is_inference():
            return _read(places)
        storage = places.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None and known[1] == places._version:
            return known[2]
        # a weak reference keeps the address of a storage from being used again
        self._known = {place: entry for place, entry in self._known.items() if not entry[0].expired()}
        documents = _read(places)
        self._known[storage._cdata] = (StorageWeakRef(storage), places._version, documents)
        return documents


def _read(places: Tensor) -> Documents:
    return Documents.of_runs(places.tolist()) if places.dim() == 2 else Documents.in_one_row(places.diff().tolist())


readings = Readings()


def attend_in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor,
    *,
    scale: float,
    is_causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return what `document_attention` does, as one operator.

    Args:
        query, key, value, scale, is_causal, window, sinks: as there.
        places: where documents are, as `Readings.of` takes it.

    Returns:
        `[batch, tokens, query heads, value head size]`.
    """
    heads_last = (tensor.transpose(1, 2) for tensor in (query, key, value))
    output, _ = torch.ops.mindspeed_mm.attend_within_documents(*heads_last, sinks, places, scale, is_causal, window)
    return output


def _how(query: Tensor, value: Tensor, places: Tensor, scale: float, is_causal: bool, window: int | None) -> Any:
    kernel = accelerator.current().attention_kernel(query, value)
    return AttentionWithin.of(kernel, readings.of(places), scale=scale, is_causal=is_causal, window=window)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    places: Tensor,
    scale: float,
    is_causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp; tensors are `[batch, tokens, heads, head size]`."""
    out, lse = _how(query, value, places, scale, is_causal, window).forward(query, key, value, sinks)
    return out.contiguous(), lse.contiguous()


def _shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    places: Tensor,
    scale: float,
    is_causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    return query.new_empty(*query.shape[:3], value.shape[-1]), query.new_empty(query.shape[:3], dtype=torch.float32)


def _attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    places: Tensor,
    scale: float,
    is_causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and sinks (without sinks: an empty tensor)."""
    how = _how(query, value, places, scale, is_causal, window)
    *grads, of_sinks = how.backward(grad_out, query, key, value, sinks, out, lse)
    of_query, of_key, of_value = (grad.contiguous() for grad in grads)
    return of_query, of_key, of_value, query.new_empty(0) if of_sinks is None else of_sinks


def _shapes_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    places: Tensor,
    scale: float,
    is_causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), of_sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, places, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, places)


def _differentiate(ctx: Any, grad_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, value, sinks, out, lse, places = ctx.saved_tensors
    *grads, of_sinks = torch.ops.mindspeed_mm.attend_within_documents_backward(
        grad_out, query, key, value, sinks, out, lse, places, *ctx.settings
    )
    return *grads, None if sinks is None else of_sinks, None, None, None, None


def _register(compute: Callable[..., Any], shapes: Callable[..., Any], schema: str) -> str:
    """Register an operator and return its name; `torch.library.custom_op` would add Python to each call."""
    name = _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mindspeed_mm::{name}", shapes, lib=_LIBRARY)
    return f"mindspeed_mm::{name}"


_LIBRARY = torch.library.Library("mindspeed_mm", "FRAGMENT")
_SETTINGS = "Tensor places, float scale, bool is_causal, SymInt? window"
_register(
    _attend_backward,
    _shapes_backward,
    "attend_within_documents_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? sinks, "
    f"Tensor out, Tensor lse, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.register_autograd(
    _register(
        _attend,
        _shapes,
        "attend_within_documents(Tensor query, Tensor key, Tensor value, Tensor? sinks, "
        f"{_SETTINGS}) -> (Tensor, Tensor)",
    ),
    _differentiate,
    setup_context=_keep,
    lib=_LIBRARY,
)
