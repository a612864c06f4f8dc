"""The bytes that a rank sends in a step, counted, and what the formulas of docs/parallelism.md give for them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

Sender = Literal["forward", "backward", "fully_shard"]
_FULLY_SHARD = "torch/distributed/fsdp/"
_NOTHING_SENT = ("recv_", "irecv", "wait_tensor", "_wrap_tensor_autograd", "barrier")
#: names of collectives in torch's two libraries, `c10d` (in place) and `_c10d_functional`
_ALL_REDUCE = ("allreduce_", "all_reduce", "all_reduce_")
_ALL_GATHER = ("_allgather_base_", "all_gather_into_tensor", "all_gather_into_tensor_out")
_REDUCE_SCATTER = ("_reduce_scatter_base_", "reduce_scatter_tensor", "reduce_scatter_tensor_out")
_ALL_TO_ALL = ("alltoall_base_", "all_to_all_single")
_SEND = ("send", "isend")


@dataclass(frozen=True)
class Sent:
    """One call of a collective, or one tensor sent to another rank.

    Attributes:
        operation: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "send".
        sender: `fully_shard`, or who else: the backward pass, or what is outside of it.
        bytes: that this rank sends. A rank's own part of an all-to-all does not count, and reductions and gatherings
            count as rings: of n ranks each sends (n-1)/n of the tensor for each of the two halves of an all-reduce.
    """

    operation: str
    sender: Sender
    bytes: float


class CountSent(TorchDispatchMode):
    """Notes what this rank sends in the context, whichever function of torch.distributed sends it.

    Attributes:
        sent: in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again as operators on its local tensors
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            arguments = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
            self._note(str(func.overloadpacket).rpartition(".")[2], {**arguments, **kwargs})
        return func(*args, **kwargs)

    def total(self, *senders: Sender) -> float:
        """Bytes that `senders` sent."""
        return sum(sent.bytes for sent in self.sent if sent.sender in senders)

    def calls(self, operation: str, *senders: Sender) -> int:
        """The number of calls of `operation` by `senders`."""
        return sum(sent.operation == operation and sent.sender in senders for sent in self.sent)

    def _note(self, name: str, given: dict[str, Any]) -> None:
        if name in _NOTHING_SENT:
            return
        tensors = _tensors_of(given)
        ranks = _group_of(given).size()
        size = sum(tensor.nbytes for tensor in tensors)
        if name in _ALL_REDUCE:
            operation, sent = "all-reduce", 2 * (ranks - 1) / ranks * size
        elif name in _ALL_GATHER:
            operation, sent = "all-gather", float((ranks - 1) * size)
        elif name in _REDUCE_SCATTER:
            operation, sent = "reduce-scatter", (ranks - 1) / ranks * size
        elif name in _ALL_TO_ALL:
            operation, sent = "all-to-all", _sent_to_others(tensors[0], given)
        elif name in _SEND:
            operation, sent = "send", float(size)
        else:
            raise NotImplementedError(f"how much a rank sends in '{name}' is not known here")
        self.sent.append(Sent(operation, _sender(), sent))


def _tensors_of(given: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a rank gives to a collective."""
    for name in ("input", "input_tensor", "tensors", "tensor"):
        if name in given:
            return list(given[name]) if isinstance(given[name], (list, tuple)) else [given[name]]
    raise NotImplementedError(f"a collective with the arguments {', '.join(given)}")


def _group_of(given: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    name = given["group_name"]
    return name if isinstance(name, dist.ProcessGroup) else dist.distributed_c10d._resolve_process_group(name)


def _sent_to_others(tensor: torch.Tensor, given: dict[str, Any]) -> float:
    group = _group_of(given)
    rows = given["input_split_sizes"]
    if not rows:
        return (group.size() - 1) / group.size() * tensor.nbytes
    others = sum(rows) - rows[group.rank()]
    return others * tensor.nbytes / max(sum(rows), 1)


def _sender() -> Sender:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if _FULLY_SHARD in frame.f_code.co_filename:
            return "fully_shard"
        frame = frame.f_back
    return "backward" if torch._C._current_graph_task_id() >= 0 else "forward"


@dataclass(frozen=True)
class Volume:
    """Bytes that a rank sends for the activations of decoder layers."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.forward + other.forward, self.backward + other.backward)

    def __sub__(self, other: Volume) -> Volume:
        return Volume(self.forward - other.forward, self.backward - other.backward)

    def __mul__(self, factor: float) -> Volume:
        return Volume(self.forward * factor, self.backward * factor)


def analytic_volume(config: Any, dims: Any, tokens: int, routed: int, element: int = 4) -> Volume:
    """What a rank sends for the activations of all decoder layers, by the formulas of docs/parallelism.md.

    Args:
        config: of the language model.
        dims: sizes of the parallelisms, `mindspeed_mm.configs.dims.Dims`.
        tokens: of all rows of a micro-batch; what the ranks split divides without a remainder.
        routed: pairs of a token and an expert, over all layers: those of this rank's tokens with experts of other
            ranks, and those of other ranks' tokens with this rank's experts. Both are sent once each way.
        element: bytes of a number, forward and backward.
    """
    layers, hidden, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads // dims.tp
    key_heads, head = config.num_key_value_heads // dims.tp, config.head_dim
    ulysses, ring, tensor = dims.ulysses, dims.ring, dims.tp
    while key_heads % ulysses:
        key_heads *= 2  # keys and values are repeated until the ranks can share them
    exchanged = (ulysses - 1) / ulysses * tokens / dims.cp * head * (2 * heads + 2 * key_heads)
    block = tokens / ring * 2 * (key_heads / ulysses) * head  # keys and values that a rank of the ring holds
    summed = 2 * 2 * (tensor - 1) / tensor * tokens / dims.cp * hidden
    layer = Volume(exchanged + (ring - 1) * block + summed, exchanged + (2 * ring - 1) * block + summed)
    if ring == 1:
        layer = Volume(exchanged + summed, exchanged + summed)
    return layer * (layers * element) + Volume(routed * hidden, routed * hidden) * element
