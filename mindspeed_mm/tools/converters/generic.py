"""Conversion of any model's weights between a HF directory and a torch_dcp checkpoint, tensor by tensor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.tools.converters.lora import (
    Factor,
    adapters_to_peft,
    merge_adapters,
    nothing_to_convert_of_adapters,
)
from mindspeed_mm.tools.converters.places import (
    Given,
    checkpoint_in,
    refuse_existing,
    structure,
    tell_no_effect,
    weights_in,
)
from mindspeed_mm.tools.inspect_weights import progress_bar, size_words
from mindspeed_mm.utils.errors import CheckpointError, ConfigError, did_you_mean
from mindspeed_mm.utils.files import is_same_path
from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    import torch

    from mindspeed_mm.checkpoint.lazy import LazyTensor
    from mindspeed_mm.checkpoint.sources import WeightSource


class GenericDCPConverter:
    """Weights of any transformers or diffusers model: HF directory to torch_dcp folder and back."""

    def hf_to_dcp(
        self,
        hf_dir: str,
        dcp_dir: str,
        dcp_prefix: str = "model.",
        hf_prefix: str = "",
        tie_weight_mapping: dict[str, str] | None = None,
        fused_linear_names: list[str] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Write a HF directory's weights as a torch_dcp checkpoint to start runs from with --load.

        Tensors are written one by one, under the names and in the shapes that the model has in training (experts
        stacked, ties once), in the dtypes of the files.

        Args:
            hf_dir: HF directory with config.json and weights.
            dcp_dir: receives release/ and latest_checkpointed_iteration.txt.
            dcp_prefix: put before the names; runs find any common prefix.
            hf_prefix: taken off the names in the HF files, if they have it.
            tie_weight_mapping: no effect, config.json says what is tied; refused if it contradicts the files.
            fused_linear_names: no effect, the model's class says what is stacked.
            trust_remote_code: let config.json bring Python code of its own.
        """
        tell_no_effect("--fused_linear_names", fused_linear_names, "the model's class says what is stacked")
        source = Given("--hf_dir", hf_dir)
        hf_to_checkpoint(
            structure(source, trust_remote_code),
            source,
            Given("--dcp_dir", dcp_dir),
            dcp_prefix=dcp_prefix,
            hf_prefix=hf_prefix,
            ties=tie_weight_mapping,
        )

    def dcp_to_hf(
        self,
        load_dir: str,
        save_dir: str,
        model_assets_dir: str | None = None,
        dtype: str | None = None,
        dcp_prefix: str | None = None,
        hf_prefix: str = "",
        tie_weight_mapping: dict[str, str] | None = None,
        fused_linear_names: list[str] | None = None,
        trust_remote_code: bool = False,
        averaged: bool = False,
        best: bool = False,
    ) -> None:
        """Write a checkpoint's weights as a HF directory: hub names, shards with an index, tokenizer and so on.

        Args:
            load_dir: a run folder (its newest checkpoint is taken), an iter_* or release folder.
            save_dir: the HF directory to write.
            model_assets_dir: HF directory with config.json, tokenizer and so on; without it, the one that the run
                was started from, as the checkpoint remembers it.
            dtype: of the written weights, or "stored" for that of each weight in the checkpoint; without it, that of
                the same weight in model_assets_dir, else config.json's.
            dcp_prefix: no effect, the prefix of the names is found.
            hf_prefix: no effect, the model's class says the hub's names.
            tie_weight_mapping: no effect, config.json says what is tied.
            fused_linear_names: no effect, the model's class says what is stacked.
            trust_remote_code: let config.json bring Python code of its own.
            averaged: write the averages that a run with --ema-decay kept, in the place of the trained weights.
            best: take the run folder's best checkpoint, of a run with --save-best, in the place of the newest.
        """
        tell_no_effect("--tie_weight_mapping", tie_weight_mapping, "config.json says what is tied")
        tell_no_effect("--fused_linear_names", fused_linear_names, "the model's class says what is stacked")
        tell_no_effect("--dcp_prefix", dcp_prefix, "the prefix of the names is found")
        tell_no_effect("--hf_prefix", hf_prefix, "the model's class says the hub's names")
        checkpoint_to_hf(
            Given("--load_dir", load_dir),
            Given("--save_dir", save_dir),
            Given("--model_assets_dir", model_assets_dir or ""),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            averaged=averaged,
            best=best,
        )

    def merge_lora(
        self,
        base: str,
        adapter: str,
        out: str,
        scaling: float | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Write a base model with adapters added as a HF or diffusers directory, tensor by tensor.

        A weight is base + alpha / rank · B·A, computed in float32 and rounded to the base's dtype.

        Args:
            base: HF directory, or the folder of a transformer in a diffusers pipeline.
            adapter: PEFT directory, pytorch_lora_weights.safetensors, another file of adapters, a run folder or a
                checkpoint of adapters, of either backend.
            out: the directory to write.
            scaling: factor on the adapters' output, where nothing beside them says alpha and rank.
            trust_remote_code: let config.json bring Python code of its own.
        """
        merge_adapters(
            Given("--base", base),
            Given("--adapter", adapter),
            Given("--out", out),
            scaling=None if scaling is None else Factor("--scaling", scaling),
            trust_remote_code=trust_remote_code,
        )

    def lora_dcp_to_hf(self, load_dir: str, save_dir: str) -> None:
        """Write the adapters of a checkpoint as a PEFT directory.

        Args:
            load_dir: a run folder (its newest checkpoint is taken), or a checkpoint of adapters.
            save_dir: the PEFT directory to write.
        """
        adapters_to_peft(Given("--load_dir", load_dir), Given("--save_dir", save_dir))

    def lora_hf_to_dcp(self, hf_dir: str, dcp_dir: str = "") -> None:
        """Say what to pass to --lora-load: a run reads PEFT directories as they are, and nothing is written.

        Args:
            hf_dir: PEFT directory.
            dcp_dir: nothing is written.
        """
        nothing_to_convert_of_adapters(Given("--hf_dir", hf_dir))


def hf_to_checkpoint(
    model: Any,
    source: Given,
    target: Given,
    *,
    dcp_prefix: str = "model.",
    hf_prefix: str = "",
    ties: Mapping[str, str] | None = None,
) -> None:
    """Write the weights of a HF directory as a checkpoint that runs start from with --load.

    Args:
        model: the model of the directory's config.json, without storage.
        target: receives release/ and the tracker; if it is the source, it is left as it is, as runs read that too.
        dcp_prefix: put before the names.
        hf_prefix: taken off the names in the files.
        ties: name in the files → name whose tensor it is said to be.

    Raises:
        CheckpointError: the weights don't belong to the model, the target is there already or can't be written.
        ConfigError: `ties` contradicts the files.
    """
    from mindspeed_mm.checkpoint.dcp_writer import write_dcp
    from mindspeed_mm.checkpoint.lazy import forget
    from mindspeed_mm.checkpoint.manifest import sum_file, write_manifest
    from mindspeed_mm.checkpoint.run_folder import TRACKER
    from mindspeed_mm.checkpoint.safetensors_writer import tensor_bytes
    from mindspeed_mm.checkpoint.sources import open_weights
    from mindspeed_mm.checkpoint.weights import plan_weights, refuse_misfits
    from mindspeed_mm.utils.files import fsync_path, replace_file

    files = open_weights(source.path)
    _refuse_other_ties(files, ties)
    weights = _Unprefixed(files, hf_prefix)
    plan = plan_weights(model, weights)
    refuse_misfits(plan, model, weights, strict=True)
    if is_same_path(source.path, target.path):
        print(f"nothing to convert into the same directory: a run reads it as it is, with --load {source.path}")
        return
    values = {dcp_prefix + name: node for name, node in plan.values.items()}
    release, root = Path(target.path) / "release", Path(target.path)
    refuse_existing(release, target.argument)
    working = root / ".release.saving"
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    total = sum(tensor_bytes(node.shape, node.dtype) for node in values.values())
    with _undone_on_failure(working):
        with progress_bar(f"{source.path} → {release}", total) as advance:
            names = write_dcp(working, values, advance)
        forget()
        with progress_bar("checksums", sum((working / n).stat().st_size for n in names)) as advance:
            sums = {name: sum_file(working / name, advance) for name in names}
        write_manifest(working, 0, sums)
        fsync_path(working)
        os.rename(working, release)
    replace_file(root / TRACKER, "release")
    print(f"{len(values)} tensors, {size_words(total)}, in {release}; start a run from it with --load {target.path}")


def checkpoint_to_hf(
    checkpoint: Given,
    target: Given,
    assets: Given,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    averaged: bool = False,
    best: bool = False,
    check: Callable[[Any, Given], None] | None = None,
) -> None:
    """Write the weights of a checkpoint as a HF directory.

    Args:
        checkpoint: a run folder, of which the newest checkpoint is taken, or a checkpoint.
        assets: the HF directory with config.json and tokenizer; "": the one that the checkpoint remembers.
        dtype: of the written weights; "stored": that of each weight in the checkpoint; None: that of the assets.
        averaged: write the averages instead of the weights.
        best: take the checkpoint that best.json names.
        check: raises if the model of config.json and the assets aren't what the converter is for.

    Raises:
        CheckpointError: there is no checkpoint, it doesn't belong to the model, or the target can't be written.
        ConfigError: there are no assets, or `dtype` is unknown.
    """
    from mindspeed_mm.checkpoint.hf_export import export_from
    from mindspeed_mm.checkpoint.safetensors_writer import tensor_bytes
    from mindspeed_mm.checkpoint.sources import DcpWeights

    stored = dtype == "stored"
    wanted = None if stored else _dtype_named(dtype)
    directory = checkpoint_in(checkpoint, best=best)
    described = assets if assets.path else Given(assets.argument, _remembered_source(directory, assets.argument))
    model = structure(described, trust_remote_code)
    if check is not None:
        check(model, described)
    source = DcpWeights(directory, averaged=True) if averaged else weights_in(directory, checkpoint)
    refuse_existing(Path(target.path), target.argument)
    total = sum(tensor_bytes(tuple(t.shape), wanted or t.dtype) for t in source.tensors().values())
    with progress_bar(f"{directory} → {target.path}", total) as advance:
        count = export_from(source, model, Path(target.path), described.path, wanted, advance, stored=stored)
    print(f"{count} tensors in {target.path}; it loads with from_pretrained")


def _dtype_named(name: str | None) -> torch.dtype | None:
    from mindspeed_mm.utils.dtypes import to_torch_dtype

    return to_torch_dtype(name)


class _Unprefixed:
    """A source without a prefix of its names."""

    in_hub_layout = True

    def __init__(self, source: WeightSource, prefix: str) -> None:
        self.path, self._source, self._prefix = source.path, source, prefix

    def tensors(self) -> dict[str, LazyTensor]:
        found = self._source.tensors()
        if self._prefix and not any(name.startswith(self._prefix) for name in found):
            notice(f"--hf_prefix '{self._prefix}' has no effect: no name in '{self.path}' begins with it")
        return {name.removeprefix(self._prefix): t for name, t in found.items()}


def _refuse_other_ties(source: WeightSource, ties: Mapping[str, str] | None) -> None:
    """Refuse ties that would replace a tensor of the files; say that any other has no effect.

    Raises:
        ConfigError: the files hold another tensor under the name that is to be tied.
    """
    import torch

    found = source.tensors() if ties else {}
    for name, origin in (ties or {}).items():
        if origin not in found:
            nearest = did_you_mean(origin, found)
            notice(f"--tie_weight_mapping has no effect: '{source.path}' has no tensor '{origin}'{nearest}")
            continue
        if name in found and not torch.equal(_value(found[name]), _value(found[origin])):
            raise ConfigError(
                f"--tie_weight_mapping: '{source.path}' holds a tensor '{name}' that isn't '{origin}', and it is "
                "kept; leave the pair out, or remove the tensor from the files and set tie_word_embeddings in "
                "config.json"
            )
        notice(f"--tie_weight_mapping has no effect: config.json says what is tied ('{name}')")


def _value(tensor: LazyTensor) -> torch.Tensor:
    from mindspeed_mm.checkpoint.lazy import whole

    return tensor.node.read(whole(tensor.shape))


def _remembered_source(directory: Path, argument: str) -> str:
    from mindspeed_mm.checkpoint.dcp import read_state

    state = read_state(directory) if (directory / "state.json").is_file() else {}
    source = state.get("source")
    if source is None or not (Path(source) / "config.json").is_file():
        where = f"'{source}', which it was started from, is not there" if source else "it does not say where it began"
        raise ConfigError(
            f"'{directory}' holds no config.json and {where}; give {argument}, the HF directory that has it"
        )
    return str(source)


@contextmanager
def _undone_on_failure(working: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        shutil.rmtree(working, ignore_errors=True)
        raise CheckpointError(f"'{working.parent}' can't be written: {error}; nothing is left of it") from error
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
