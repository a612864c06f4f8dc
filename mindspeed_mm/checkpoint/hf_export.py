"""Write a model as a HF directory in the hub's layout: hub names, shards with an index, and the small files.

A diffusers model is written the same way in diffusers' layout, any other model under its own names.

Weights are streamed: tensors of the model are gathered one after the other, each on the rank that writes its file. No
rank has more than its shard and a few tensors in memory.
"""

from __future__ import annotations

import copy
import itertools
import json
import queue
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from mindspeed_mm.checkpoint.agreement import Agreement, StepFailed
from mindspeed_mm.checkpoint.hub_config import set_config_dtypes, with_dtype, write_own_config
from mindspeed_mm.checkpoint.lazy import LazyTensor, Region, forget, leaf, whole
from mindspeed_mm.checkpoint.manifest import ReportBytes
from mindspeed_mm.checkpoint.pipeline_folder import copy_parts, is_pipeline, size_in_words
from mindspeed_mm.checkpoint.publish import copy_small_files, make_empty, replace_folder, sync_files, working_folder
from mindspeed_mm.checkpoint.safetensors_writer import SafetensorsWriter, tensor_bytes
from mindspeed_mm.checkpoint.sources import WeightSource, has_weight_files, open_weights
from mindspeed_mm.checkpoint.tensors import persistent_tensors
from mindspeed_mm.checkpoint.weights import names_left_out, plan_weights, refuse_misfits
from mindspeed_mm.models.common.diffusers_init import is_diffusers_class
from mindspeed_mm.models.common.pipeline_layout import PipelineLayout
from mindspeed_mm.models.transformers.meta_model import build_meta_copy, type_without_fsdp
from mindspeed_mm.utils.errors import CheckpointError
from mindspeed_mm.utils.log import info_rank0

_LARGEST_FILE = 5_000_000_000  # as on the hub
_SMALLEST_FILE = 1_000_000_000


class Fetcher(Protocol):
    """Fetches whole tensors of the model."""

    def tensors(self) -> dict[str, LazyTensor]:
        """Return the model's tensors by name, in the same order on all ranks."""

    def fetch(self, names: set[str], owner: int) -> None:
        """Fetch tensors to rank `owner`, before it reads them; a collective. Earlier ones may be discarded."""


class FromModel:
    """Gathers sharded parameters from all ranks."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._tensors = persistent_tensors(model, tied_once=False)
        self._rank = rank
        self._whole: dict[str, torch.Tensor] = {}

    def tensors(self) -> dict[str, LazyTensor]:
        return {n: leaf(n, t.shape, t.dtype, self._read) for n, t in self._tensors.items()}

    def fetch(self, names: set[str], owner: int) -> None:
        if self._rank == owner:
            self._whole = {}
        for name in sorted(names):
            tensor = self._tensors[name].detach()
            value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self._rank == owner:
                self._whole[name] = value.to("cpu")

    def _read(self, name: str, region: Region) -> torch.Tensor:
        value = self._whole[name]
        for dim, (start, length) in enumerate(region):
            value = value.narrow(dim, start, length)
        return value


class _FromSource:
    """Reads from files, in a single process."""

    def __init__(self, values: Mapping[str, LazyTensor]) -> None:
        self._values = dict(values)

    def tensors(self) -> dict[str, LazyTensor]:
        return self._values

    def fetch(self, names: set[str], owner: int) -> None:
        pass


@dataclass
class _File:
    """A file to be written.

    Attributes:
        tensors: hub name → (expression, dtype to write).
        copied: names of tensors that are copied from the source, as the model has no part of them.
    """

    name: str
    tensors: dict[str, tuple[LazyTensor, torch.dtype]]
    copied: Set[str] = frozenset()

    def runs(self) -> Iterator[tuple[set[str], list[str]]]:
        """Yield (names of the model's tensors, consecutive hub names that are computed from them)."""
        by_leaves = itertools.groupby(self.tensors, key=self._leaves)
        for leaves, names in by_leaves:
            yield leaves, list(names)

    def _leaves(self, name: str) -> set[str]:
        return set() if name in self.copied else self.tensors[name][0].node.leaves()


def export(
    model: nn.Module,
    directory: Path,
    source: str | None,
    group: dist.ProcessGroup,
    dtype: torch.dtype | None,
    conversions: list[Any] | None = None,
    layout: PipelineLayout | None = None,
) -> None:
    """Write `model` to `directory`, with the source's tokenizer, processor and templates; a collective.

    Args:
        model: a transformers or diffusers model, sharded or not; or any other model, which is written under its names.
        directory: target; an existing one is replaced.
        source: the HF directory that the model was built from; its small files are copied, and its dtypes kept.
        group: process group for tensors in host memory.
        dtype: dtype of written weights that the source doesn't have; None: the dtype of training.
        conversions: transformers' weight conversions that were applied on loading; None: derived from `source`.
        layout: the pipeline of which the model is a component, written as a whole; None: the model alone.

    Raises:
        CheckpointError: a rank could not write; the directory is then unchanged.
    """
    fetcher = FromModel(model, dist.get_rank(group))
    export_gathered(model, fetcher, directory, source, group, dtype, conversions, layout)


def export_gathered(
    model: nn.Module,
    fetcher: Fetcher,
    directory: Path,
    source: str | None,
    group: dist.ProcessGroup,
    dtype: torch.dtype | None,
    conversions: list[Any] | None = None,
    layout: PipelineLayout | None = None,
) -> None:
    """Write the tensors of `fetcher` as a HF directory of `model`; the other arguments and errors are `export`'s.

    Args:
        model: used for its class and configuration only.
    """
    agreement = Agreement(group, directory.parent)
    known = _weights_of(source)
    hub = _hub_layout(model, fetcher.tensors(), known, conversions)
    copied = _other_parts(model, source, known)
    dtypes = _dtypes({**hub, **copied}, known, dtype)
    _write_directory(model, directory, source, hub, copied, dtypes, dtype, fetcher, agreement, layout=layout)
    loads = isinstance(model, PreTrainedModel) or is_diffusers_class(type(model))
    how = "loads with from_pretrained" if loads else "under the model's own names"
    size = f"; {size_in_words(directory)}" if agreement.rank == 0 and is_pipeline(directory) else ""
    info_rank0(f"exported to {directory} ({how}{size})")


def export_from(
    source: WeightSource,
    model: nn.Module,
    directory: Path,
    small_files: str,
    dtype: torch.dtype | None,
    progress: ReportBytes | None = None,
    *,
    stored: bool = False,
) -> int:
    """Convert the weights of `source` to a HF directory, in one process and tensor by tensor.

    Args:
        model: a model of the right class and configuration, on the meta device.
        small_files: a HF directory whose tokenizer, processor and templates are copied.
        dtype: dtype of the written weights; None: that of the same weight in `small_files`, else the model's.
        progress: called with the number of bytes written.
        stored: write every weight in the dtype that it has in `source`; `dtype` is None.

    Returns:
        the number of tensors.
    """
    plan = plan_weights(model, source)
    refuse_misfits(plan, model, source, strict=True)
    values = {name: LazyTensor(node) for name, node in plan.values.items()}
    known = _weights_of(small_files)
    hub = _hub_layout(model, values, known, None)
    wanted = None if stored else dtype or next(p.dtype for p in model.parameters() if p.is_floating_point())
    copied = _other_parts(model, small_files, known)
    dtypes = _dtypes({**hub, **copied}, None if dtype or stored else known, wanted)
    said = _main_dtype((t, dtypes[n]) for n, t in hub.items()) if stored else dtype
    _write_directory(model, directory, small_files, hub, copied, dtypes, said, _FromSource(values), None, progress)
    return len(hub) + len(copied)


def _weights_of(source: str | None) -> WeightSource | None:
    return open_weights(source) if source is not None and has_weight_files(Path(source)) else None


def _hub_layout(
    model: nn.Module, tensors: dict[str, LazyTensor], source: WeightSource | None, conversions: list[Any] | None
) -> dict[str, LazyTensor]:
    """Return the expressions of the hub's tensors, by hub name: transformers' conversions, reverted."""
    from transformers.core_model_loading import revert_weight_conversion

    meta_model = build_meta_copy(model)
    if meta_model is None:
        return {name: tensors[name] for name in persistent_tensors(model)}
    if conversions is None and source is not None:
        conversions = plan_weights(model, source).conversions
    if conversions is not None:
        meta_model._weight_conversions = conversions
    tied = getattr(meta_model, "all_tied_weights_keys", None) or {}
    ignored = meta_model._keys_to_ignore_on_save or ()
    kept = {n: t for n, t in tensors.items() if n not in tied and n not in ignored}
    hub = revert_weight_conversion(meta_model, kept)
    shapes = {n: tuple(t.shape) for n, t in source.tensors().items()} if source is not None else {}
    return {name: _as_in_source(tensor, shapes.get(name)) for name, tensor in hub.items()}


def _whole_config(model: Any, source: str | None) -> dict[str, Any] | None:
    """Return config.json of the source if the model is a part of its model (an Omni model's thinker); else None."""
    path = Path(source) / "config.json" if source is not None else None
    if path is None or not path.is_file() or not isinstance(model, PreTrainedModel):
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    own = model.config.model_type
    is_part = any(isinstance(part, dict) and part.get("model_type") == own for part in content.values())
    return content if is_part and content.get("model_type") != own else None


def _other_parts(model: nn.Module, source: str | None, known: WeightSource | None) -> dict[str, LazyTensor]:
    """Return the source's tensors of the parts that the model doesn't have, which are copied."""
    if known is None or _whole_config(model, source) is None:
        return {}
    tensors = known.tensors()
    return {name: tensors[name] for name in names_left_out(model, tensors)}


def _as_in_source(tensor: LazyTensor, shape: tuple[int, ...] | None) -> LazyTensor:
    """Transpose a tensor that was transposed on loading because of its shape (experts of Qwen3-VL-MoE).

    Reverted, transformers' conversion compares with the model's shape again and doesn't transpose it.
    """
    if shape is None or tuple(tensor.shape) == shape or tensor.dim() < 2:
        return tensor
    swapped = tensor.transpose(-1, -2)
    return swapped if tuple(swapped.shape) == shape else tensor


def _write_directory(
    model: nn.Module,
    directory: Path,
    source: str | None,
    hub: dict[str, LazyTensor],
    copied: dict[str, LazyTensor],
    dtypes: Mapping[str, torch.dtype],
    dtype: torch.dtype | None,
    fetcher: Fetcher,
    agreement: Agreement | None,
    progress: ReportBytes | None = None,
    layout: PipelineLayout | None = None,
) -> None:
    rank, size = (agreement.rank, agreement.size) if agreement else (0, 1)

    def step(name: str, part: Callable[[], Any]) -> None:
        if agreement:
            agreement.step(name, part)
        else:
            part()

    working = working_folder(directory)
    inside = working if layout is None else working / layout.component
    files = _plan_files({**hub, **copied}, dtypes, size, _weights_name(model))
    for file in files:
        file.copied = copied.keys() & file.tensors.keys()
    try:
        step("preparing the folder", lambda: make_empty(working, inside) if rank == 0 else None)
        step("writing weights", lambda: _write_files(files, fetcher, inside, rank, size, progress))
        if layout is not None:
            step("copying the pipeline's other parts", lambda: copy_parts(layout, working, rank, size))
        step("writing config and tokenizer", lambda: _finish(model, source, files, dtype, inside) if not rank else None)
        step("publishing the folder", lambda: replace_folder(working, directory) if rank == 0 else None)
    except BaseException as error:
        if rank == 0:
            shutil.rmtree(working, ignore_errors=True)
        if isinstance(error, (StepFailed, OSError)):
            raise CheckpointError(f"'{directory}' could not be exported: {error}; nothing is left of it") from error
        raise
    finally:
        forget()


def _dtypes(
    hub: Mapping[str, LazyTensor], source: WeightSource | None, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    known = {n: t.dtype for n, t in source.tensors().items()} if source is not None else {}
    dtypes = {}
    for name, tensor in hub.items():
        wanted = known.get(name, dtype)
        floats = wanted is not None and tensor.dtype.is_floating_point and wanted.is_floating_point
        dtypes[name] = wanted if floats and wanted is not None else tensor.dtype
    return dtypes


def _weights_name(model: nn.Module) -> str:
    """Return the base name of weight files in the model's library."""
    return "diffusion_pytorch_model" if is_diffusers_class(type(model)) else "model"


def _plan_files(hub: Mapping[str, LazyTensor], dtypes: Mapping[str, torch.dtype], size: int, name: str) -> list[_File]:
    bytes_of = {n: tensor_bytes(tuple(t.shape), dtypes[n]) for n, t in hub.items()}
    largest = min(_LARGEST_FILE, max(-(-sum(bytes_of.values()) // size), _SMALLEST_FILE))
    split = split_state_dict_into_shards_factory(
        bytes_of,
        get_storage_size=lambda size: size,
        filename_pattern=f"{name}{{suffix}}.safetensors",
        max_shard_size=largest,
    )
    return [_File(name, {n: (hub[n], dtypes[n]) for n in names}) for name, names in split.filename_to_tensors.items()]


def _write_files(
    files: list[_File], fetcher: Fetcher, working: Path, rank: int, size: int, progress: ReportBytes | None
) -> None:
    """Write file i on rank i modulo size. Ranks gather in turn, and write while other ranks gather."""
    problem: BaseException | None = None
    for start in range(0, len(files), size):
        batch = files[start : start + size]
        mine = batch[rank] if rank < len(batch) else None
        writer = _Writer(working, mine, progress) if mine and problem is None else None
        turns = itertools.zip_longest(*(file.runs() for file in batch))
        for owner, run in itertools.chain.from_iterable(enumerate(turn) for turn in turns):
            if run is None:
                continue
            leaves, names = run
            fetcher.fetch(leaves, owner)
            if owner == rank and writer is not None and problem is None:
                try:
                    for name in names:
                        writer.put(name)
                except BaseException as error:  # keep gathering, as the other ranks need this rank's parts
                    problem = error
        if writer is not None:
            closing = writer.close()  # always; after an error it also reports tensors that were never written
            problem = problem or closing
    if problem is not None:
        raise problem


class _Writer:
    """Writes a file in a separate thread."""

    def __init__(self, working: Path, file: _File, progress: ReportBytes | None) -> None:
        self._file, self._progress = file, progress
        self._path = working / file.name
        self._queue: queue.Queue[tuple[str, torch.Tensor] | None] = queue.Queue(maxsize=2)
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hf-export", daemon=True)
        self._thread.start()

    def put(self, name: str) -> None:
        lazy, dtype = self._file.tensors[name]
        if self._problem is None:
            # a copy, as the model may change, and a gathered tensor may be released, before it is written
            self._queue.put((name, lazy.node.read(whole(lazy.node.shape)).to(dtype, copy=True)))

    def close(self) -> BaseException | None:
        self._queue.put(None)
        self._thread.join()
        return self._problem

    def _run(self) -> None:
        items = iter(self._queue.get, None)
        try:
            tensors = {n: (tuple(lazy.shape), dtype) for n, (lazy, dtype) in self._file.tensors.items()}
            with SafetensorsWriter(self._path, tensors) as writer:
                for name, value in items:
                    writer.write(name, value)
                    if self._progress is not None:
                        self._progress(value.nbytes)
        except BaseException as error:
            self._problem = error
            for _ in items:  # drain the queue, so that `put` doesn't block for ever
                pass


def _finish(
    model: nn.Module,
    source: str | None,
    files: list[_File],
    dtype: torch.dtype | None,
    working: Path,
) -> None:
    described: Any = model
    of_whole = _whole_config(model, source)
    if not isinstance(model, PreTrainedModel):
        write_own_config(model, working)
    elif of_whole is None:
        config = copy.deepcopy(described.config)
        main = _main_dtype(written for file in files for written in file.tensors.values())
        set_config_dtypes(config, source, dtype, main)
        config.architectures = [type_without_fsdp(model).__name__]
        config.save_pretrained(working)
        if described.can_generate():
            described.generation_config.save_pretrained(working)
    else:
        own = of_whole.get("dtype", of_whole.get("torch_dtype"))
        wanted = str(dtype).removeprefix("torch.") if dtype is not None else own
        content = of_whole if wanted is None or wanted == own else with_dtype(of_whole, wanted)
        (working / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if len(files) > 1:
        total = sum(tensor_bytes(tuple(t.shape), d) for f in files for t, d in f.tensors.values())
        parameters = sum(t.numel() for f in files for t, _ in f.tensors.values())
        index = {
            "metadata": {"total_parameters": parameters, "total_size": total},
            "weight_map": {name: file.name for file in files for name in file.tensors},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (working / f"{_weights_name(model)}.safetensors.index.json").write_text(text, encoding="utf-8")
    if source is not None:
        copy_small_files(Path(source), working)
    sync_files(working)


def _main_dtype(written: Iterable[tuple[LazyTensor, torch.dtype]]) -> torch.dtype:
    """Return the dtype of most written values, of (tensor, dtype to write)."""
    counts: Counter[torch.dtype] = Counter()
    for tensor, dtype in written:
        counts[dtype] += tensor.numel() if dtype.is_floating_point else 0
    return counts.most_common(1)[0][0]
