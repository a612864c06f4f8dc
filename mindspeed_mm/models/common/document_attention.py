"""Attention document by document in transformers' models: no mask keeps the documents of rows apart, and none is made.

A function registered with transformers computes it by the device's kernel. A hook in front of the language model hands
the documents of its rows to the layers as a keyword argument, so that a block that is recomputed in backward sees those
of its forward pass. Rows whose documents aren't known (in generation, or with holes in their mask) have transformers'
own mask and attention.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mindspeed_mm import accelerator
from mindspeed_mm.accelerator.attention import Documents, document_attention
from mindspeed_mm.models.common.attention_operator import attend_in_graph
from mindspeed_mm.models.common.packed import PACKING_KEY
from mindspeed_mm.utils.errors import ConfigError

KEYWORD = "row_documents"
"""The keyword argument of the layers, and the key of a prepared micro-batch."""
LINEAR = "linear_attention"
"""The type of layers whose attention is no function of transformers'."""
_INSTEAD_OF = ("sdpa", "eager")


class DocumentsOfCall:
    """What the layers of one forward pass are given; no dataclass, which FSDP would copy where it casts inputs.

    Attributes:
        documents: of their rows.
        attended: the attention layers that were called with them; None: nobody wants to know.
        runs: of the documents, as compiled layers take them, once `enter_graph` was called.
    """

    def __init__(self, documents: Documents, attended: set[int] | None = None) -> None:
        self.documents, self.attended = documents, attended
        self.runs: torch.Tensor | None = None

    def of_rows(self, start: int, count: int) -> DocumentsOfCall:
        """Return what the layers are given for some of the rows."""
        return DocumentsOfCall(self.documents.of_rows(start, count), self.attended)

    def enter_graph(self, ready: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Make ready for a compiled layer; whether it may be one: a graph can't say which layers were called."""
        if self.runs is None:
            self.runs = ready(self.documents.runs)
        return self.attended is None


class DocumentAttention:
    """Lets a language model attend document by document; `for_batch` announces the documents of each batch."""

    def __init__(self, language_model: nn.Module, name: str) -> None:
        """
        Args:
            language_model: receives its arguments by name; its decoder layers are `layers`. It must not be wrapped yet,
                so that the hook runs after FSDP's.
            name: name of the model, for messages.
        """
        self._name = name
        config: Any = language_model.config
        layers: Any = language_model.layers
        self._layers = len(layers) - (getattr(config, "layer_types", None) or []).count(LINEAR)
        self._implementation: str = config._attn_implementation
        use_attention(language_model, _name_of(self._implementation))
        self._documents: Documents | None = None
        self._call: DocumentsOfCall | None = None
        self._is_checked = False
        language_model.register_forward_pre_hook(self._before, with_kwargs=True)
        language_model.register_forward_hook(self._after)

    def for_batch(self, documents: Documents | None) -> None:
        """Set the documents of the next forward of the model; None: they aren't known."""
        self._documents = documents

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        documents, self._documents = self._documents, None
        self._call = None if documents is None else DocumentsOfCall(documents, None if self._is_checked else set())
        if self._call is None:
            return args, kwargs
        mask, hidden = kwargs.get("attention_mask"), kwargs.get("inputs_embeds")
        if not isinstance(mask, dict):  # by type of layer, of which some are linear attention
            mask = absent_mask((kwargs["input_ids"] if hidden is None else hidden).device)
        return args, {**kwargs, "attention_mask": mask, KEYWORD: self._call}

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call, self._call = self._call, None
        if call is None or call.attended is None:
            return
        found, expected = len(call.attended), self._layers
        if found != expected:
            raise ConfigError(
                f"{self._name}: {found} of its {expected} attention layers called the function that keeps documents of "
                f"a row apart; set attn_implementation: {self._implementation} in model.json"
            )
        self._is_checked = True


def absent_mask(device: torch.device) -> torch.Tensor:
    """Return what stands for a mask where documents are known: transformers passes on one of four dimensions as it is,
    and makes none."""
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def use_attention(part: nn.Module, implementation: str) -> None:
    """Give a part of a model an attention function that is registered with transformers, in place.

    Its modules get a copy of their configuration: the model's own stays as it is for who builds the model anew.

    Args:
        part: with a configuration that the modules in it share.
        implementation: the function's name.
    """
    shared: Any = part.config
    own = copy.deepcopy(shared)
    own._attn_implementation = implementation
    for module in part.modules():
        if getattr(module, "config", None) is shared:
            module.config = own  # type: ignore[assignment]


def why_not_by_documents(config: Any) -> str | None:
    """Return why the attention of a language model can't be computed document by document; None: it can.

    Args:
        config: of the language model.
    """
    if config._attn_implementation not in _INSTEAD_OF:
        return f"its attention is {config._attn_implementation}"
    for key, what in (("attention_dropout", "dropout"), ("attn_logit_softcapping", "a cap of its scores")):
        if getattr(config, key, None):
            return f"config.json's {key} asks for {what}"
    return None


def attend_within_documents(
    implementation: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    row_documents: DocumentsOfCall | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention within documents; an attention function of transformers.

    Args:
        implementation: transformers' attention, for rows whose documents aren't known.
        module: the attention layer.
        query: [batch, heads, sequence, head size].
        key: [batch, key-value heads, sequence, head size].
        value: [batch, key-value heads, sequence, value head size].
        attention_mask: not used where documents are known.
        scaling: of the scores; None: head size ** -0.5.
        sliding_window: tokens that a query sees; None: all before it.
        s_aux: [heads], attention sinks.
        row_documents: of these rows.
        kwargs: dropout and so on, as the layer's own attention function takes them.

    Returns:
        [batch, sequence, heads, value head size], and the weights, if transformers' attention returns them.

    Raises:
        ConfigError: the layer asks for what no kernel computes.
    """
    if row_documents is None:
        own = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
        function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, own)
        optional = {"sliding_window": sliding_window, "s_aux": s_aux}
        given = {**kwargs, **{name: value for name, value in optional.items() if value is not None}}
        return function(module, query, key, value, attention_mask, scaling=scaling, **given)
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} calls attention with {name}, which isn't computed document by document; set "
                f"attn_implementation: {implementation} in model.json, or {PACKING_KEY}"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        runs = row_documents.runs
        assert runs is not None, "enter_graph() comes first"
        return attend_in_graph(query, key, value, runs, scale=scale, window=sliding_window, sinks=s_aux), None
    if row_documents.attended is not None:
        row_documents.attended.add(id(module))
    output = document_attention(
        accelerator.current().attention_kernel(query.transpose(1, 2), value.transpose(1, 2)),
        query,
        key,
        value,
        row_documents.documents,
        scale=scale,
        window=sliding_window,
        sinks=s_aux,
    )
    return output, None


def keeps_documents_apart(implementation: str) -> bool:
    """Whether a configuration's attention function is ours, which computes it by the device's kernel."""
    return implementation in map(_name_of, _INSTEAD_OF)


def _name_of(implementation: str) -> str:
    return f"documents_or_{implementation}"


for _implementation in _INSTEAD_OF:
    ALL_ATTENTION_FUNCTIONS.register(
        _name_of(_implementation), functools.partial(attend_within_documents, _implementation)
    )
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name_of(_implementation), ALL_MASK_ATTENTION_FUNCTIONS[_implementation])
