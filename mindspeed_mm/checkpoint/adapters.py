"""Adapters of a run in files: what is loaded and exported, and the checks of checkpoints.

A checkpoint of a run with LoRA holds the adapters, what is trained whole, and their optimizer's state; its state.json
has the content of adapter_config.json under `lora`, and refers to the base model by `source`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from mindspeed_mm.checkpoint.adapter_files import OF_PEFT, WEIGHTS, open_adapters, write_pipeline_adapters
from mindspeed_mm.checkpoint.agreement import Agreement, StepFailed
from mindspeed_mm.checkpoint.hf_export import Fetcher
from mindspeed_mm.checkpoint.lazy import LazyTensor, whole
from mindspeed_mm.checkpoint.publish import copy_small_files, make_empty, replace_folder, sync_files, working_folder
from mindspeed_mm.checkpoint.run_folder import find_checkpoint, has_checkpoint
from mindspeed_mm.checkpoint.sources import shown
from mindspeed_mm.checkpoint.start import PEFT_CONFIG, Start
from mindspeed_mm.checkpoint.tensors import local_part, persistent_tensors, trained_tensors
from mindspeed_mm.configs.lora import LoraOptions
from mindspeed_mm.models.common.adapters import AdapterPlan, peft_config
from mindspeed_mm.models.common.expert_adapters import from_peft, to_peft
from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.utils.adapter_names import is_adapter, stored_name
from mindspeed_mm.utils.errors import CheckpointError, ConfigError
from mindspeed_mm.utils.files import fsync_path
from mindspeed_mm.utils.log import info_rank0

#: flag → key of adapter_config.json
_KEYS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_use_rslora": "use_rslora",
    "lora_use_dora": "use_dora",
}


def adapter_config(model: nn.Module, options: LoraOptions, plan: AdapterPlan, source: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Args:
        model: the model with its adapters, or without.
        source: directory of the base model.
    """
    config = peft_config(options, plan)
    config.target_modules = _targets_in_words(model, options, plan)
    config.modules_to_save = sorted({*plan.saved_modules, *_parents(plan)}) or None
    # of modules that share a weight, only one has it by its name
    config.ensure_weight_tying = any(not _names_in(module, plan.whole) for module in plan.saved_modules)
    config.base_model_name_or_path = source
    config.init_lora_weights = True
    config.inference_mode = True
    if as_trainable(model).is_transformers:
        config.task_type = "CAUSAL_LM"
    content = {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    return dict(json.loads(json.dumps(content, default=str)))


def _targets_in_words(model: nn.Module, options: LoraOptions, plan: AdapterPlan) -> list[str]:
    """Return the targets as written if PEFT, which only compares the ends of paths, understands them so; else paths."""
    words = [word for word in options.target_modules if not word.startswith("all-") and "{" not in word]
    paths = [path for path, _ in model.named_modules()]
    ends = [p for p in paths if any(p == word or p.endswith(f".{word}") for word in words)]
    as_written = len(words) == len(options.target_modules) and set(ends) == set(plan.modules)
    return words if as_written else list(plan.modules)


def _names_in(module: str, names: Collection[str]) -> list[str]:
    return [name for name in names if name.startswith(f"{module}.")]


def _parents(plan: AdapterPlan) -> set[str]:
    """Return the modules that own parameters which are trained whole without being named."""
    parents = {name.rpartition(".")[0] for name in plan.whole}
    return {p for p in parents if not any(f"{p}.".startswith(f"{saved}.") for saved in plan.saved_modules)}


def refuse_other_adapters(found: Mapping[str, Any], options: LoraOptions, where: str) -> None:
    """Raise if stored adapters mean something else under the flags of this run.

    Args:
        found: content of adapter_config.json.
        where: the folder that it comes from, for the message.

    Raises:
        ConfigError: a setting differs; the message names the flag and both values.
    """
    patterns = [key for key in ("rank_pattern", "alpha_pattern") if found.get(key)]
    if patterns:
        raise ConfigError(
            f"{where}: its adapters have a rank or alpha of their own for some layers ({', '.join(patterns)}), and "
            "those of a run have one; merge them into their base model (mm-convert … merge_lora) to train on from there"
        )
    differ = []
    for flag, value in options.identity.items():
        stored = found.get(_KEYS[flag], value)
        if stored != value:
            differ.append(f"--{flag.replace('_', '-')} is {value} and was {stored}")
    if differ:
        raise ConfigError(f"{where}: its adapters were trained with other settings: {'; '.join(differ)}; give those")


def refuse_other_kind(saved: Mapping[str, Any], options: LoraOptions | None, directory: Path, resumes: bool) -> None:
    """Raise if a checkpoint holds adapters and the run trains none, or the other way round.

    Args:
        saved: content of its state.json.
        options: adapters of the run; None: it trains none.
        resumes: whether the run goes on with the checkpoint's training state.

    Raises:
        ConfigError: the message says which flags to give.
    """
    found = saved.get("lora")
    if found is not None and options is None:
        targets = " ".join(found.get("target_modules") or []) or "..."
        raise ConfigError(
            f"--load: '{directory}' holds adapters only (LoRA), and this run has no --lora-target-modules; add the "
            f"flags that it was trained with (--lora-target-modules {targets} --lora-r {found.get('r')} --lora-alpha "
            f"{found.get('lora_alpha')}), or merge it into its base model with mm-convert first"
        )
    if found is None and options is not None and resumes:
        raise ConfigError(
            f"--load: '{directory}' is a checkpoint of a run without LoRA; add --finetune to take its weights as the "
            "base model, or leave the lora flags out to go on with that run"
        )
    if found is not None and options is not None:
        refuse_other_adapters(found, options, f"--load '{directory}'")
        before = saved.get("lora_quantize")
        if resumes and before != options.quantize:
            how = (
                "without --lora-quantize; leave it out" if before is None else f"with --lora-quantize {before}; add it"
            )
            raise ConfigError(
                f"--load: the adapters of '{directory}' were trained {how}, or add --finetune to begin a run with them"
            )


def base_of(saved: Mapping[str, Any], options: LoraOptions, start: Start) -> str | None:
    """Return the folder of the base model's weights: --load-base-model, else that of the checkpoint's own run.

    Args:
        saved: content of the checkpoint's state.json; empty if there is none.
        options: adapters of the run.
        start: what --load names.

    Returns:
        None: --load or model.json names it.

    Raises:
        ConfigError: --load holds a base model too, or the one of the checkpoint is gone.
    """
    if options.base is not None and start.directory is not None and not start.has_adapters:
        raise ConfigError(
            f"--load-base-model {options.base}: '{start.directory}' of --load holds a base model too, and no adapters; "
            "keep one of them"
        )
    found = saved.get("base")
    if options.base is not None and has_checkpoint(Path(options.base)):  # mm-convert and runs write such a folder
        return str(find_checkpoint(Path(options.base)).directory)
    if options.base is not None or found is None:
        return options.base
    if not Path(found).is_dir():
        raise ConfigError(
            f"--load: the adapters of '{start.directory}' belong to the base model in '{found}', which is not there; "
            "give its folder as --load-base-model"
        )
    return str(found)


@torch.no_grad()
def load_adapters(model: nn.Module, path: Path, options: LoraOptions, *, allow_pickle: bool = False) -> None:
    """Fill adapters and what is trained whole from files; each rank reads its part.

    Args:
        path: what `open_adapters` opens.
        allow_pickle: see `open_weights`.

    Raises:
        CheckpointError: a tensor is missing, left over or of another shape; nothing has been changed then.
        ConfigError: the stored adapters mean something else under the flags of the run.
    """
    stored, wanted = read_adapters(model, path, options, allow_pickle=allow_pickle)
    for name, target in wanted.items():
        local, region = local_part(target.detach())
        if 0 not in local.shape:
            stored[name].node.read_into(region, local)


def read_adapters(
    model: nn.Module, path: Path, options: LoraOptions, *, allow_pickle: bool = False
) -> tuple[dict[str, LazyTensor], dict[str, torch.Tensor]]:
    """Return the tensors of stored adapters, none of which is read yet, and those of the model that they fill.

    Args:
        model: with adapters; may be on the meta device.
        path, allow_pickle: see `load_adapters`.

    Raises:
        CheckpointError: a tensor is missing, left over or of another shape.
        ConfigError: the stored adapters mean something else under the flags of the run.
    """
    found = open_adapters(path, allow_pickle=allow_pickle)
    refuse_other_adapters(found.config, options, f"--lora-load '{path}'")
    every = persistent_tensors(model, tied_once=False)
    stored = found.named(lambda name: stored_name(name) in every)
    wanted = _tensors_of_file(model, stored)
    plan = as_trainable(model).adapter_plan
    parameters = () if plan is None else plan.parameters
    stored = {n: from_peft(n, t, parameters, wanted[n].shape) if n in wanted else t for n, t in stored.items()}
    refuse_adapter_misfits(stored, {name: tuple(t.shape) for name, t in wanted.items()}, path)
    info_rank0(f"adapters: {len(wanted)} tensors from '{path}'")
    return stored, wanted


def _tensors_of_file(model: nn.Module, stored: Collection[str]) -> dict[str, torch.Tensor]:
    """Return what a PEFT directory must fill, by its names there.

    PEFT also writes a tied weight that is trained by each of its names, and the weight of an embedding or output layer
    that has adapters.
    """
    every = persistent_tensors(model, tied_once=False)
    wanted = trained_tensors(model)
    for name in stored:
        own = stored_name(name)
        if own in every and (every[own].requires_grad or (own != name and not is_adapter(name))):
            wanted[name] = every[own]
    return wanted


def refuse_adapter_misfits(stored: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]], directory: Path) -> None:
    """Raise if stored adapters don't fit.

    Args:
        stored: tensors by name.
        wanted: shapes of the run's, by name.

    Raises:
        CheckpointError: a tensor is missing, left over or of another shape.
    """
    missing, unexpected = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
    problems = []
    if missing:
        problems.append(f"lacks {len(missing)} tensors of this run: {shown(missing)}")
    if unexpected:
        problems.append(f"holds {len(unexpected)} that this run has no place for: {shown(unexpected)}")
    for name in wanted.keys() & stored.keys():
        if tuple(stored[name].shape) != wanted[name]:
            problems.append(f"{name} has shape {tuple(stored[name].shape)}, this run needs {wanted[name]}")
            break
    if problems:
        raise CheckpointError(
            f"'{directory}' {'; '.join(problems)}; --lora-target-modules must name the layers that it was trained with"
        )


def write_peft_files(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write adapter_model.safetensors and adapter_config.json.

    Args:
        directory: an existing one.
        tensors: by their names and in their shapes in checkpoints.
        config: content of adapter_config.json.
    """
    parameters = config.get("target_parameters") or ()
    values = {OF_PEFT + n: to_peft(n, t, parameters).contiguous().clone() for n, t in tensors.items()}
    save_file(values, directory / WEIGHTS, metadata={"format": "pt"})
    fsync_path(directory / WEIGHTS)
    (directory / PEFT_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def export_adapters(
    fetcher: Fetcher,
    names: list[str],
    directory: Path,
    config: Mapping[str, Any],
    source: str | None,
    group: dist.ProcessGroup,
    *,
    of_pipeline: bool = False,
) -> None:
    """Write adapters as a PEFT directory that loads with `PeftModel.from_pretrained`; a collective.

    Those of a diffusers model are written as its pipelines load them (`load_lora_weights`), in one file with the
    settings in its header, unless modules were trained whole, which that file has no place for.

    Args:
        fetcher: gathers the tensors.
        names: of the adapters and of what is trained whole, the same on all ranks.
        directory: target; an existing one is replaced.
        config: content of adapter_config.json.
        source: directory of the base model, whose tokenizer, processor and templates are copied.
        group: process group for tensors in host memory.
        of_pipeline: whether they belong to a diffusers model.

    Raises:
        CheckpointError: a rank could not write; the directory is then unchanged.
    """
    agreement = Agreement(group, directory.parent)
    working = working_folder(directory)
    of_pipeline = of_pipeline and all(map(is_adapter, names))

    def write() -> None:
        make_empty(working, working)
        tensors = fetcher.tensors()
        values = {n: tensors[n].node.read(whole(tensors[n].shape)) for n in names}
        (write_pipeline_adapters if of_pipeline else write_peft_files)(working, values, config)
        if source is not None and Path(source).is_dir() and not of_pipeline:
            copy_small_files(Path(source), working)
        sync_files(working)
        replace_folder(working, directory)

    fetcher.fetch(set(names), 0)
    try:
        agreement.step("writing adapters", lambda: write() if agreement.rank == 0 else None)
    except BaseException as error:
        if agreement.rank == 0:
            shutil.rmtree(working, ignore_errors=True)
        if isinstance(error, (StepFailed, OSError)):
            raise CheckpointError(f"'{directory}' could not be exported: {error}; nothing is left of it") from error
        raise
    info_rank0(f"exported {len(names)} tensors of adapters to {directory} (loads with {_loader(of_pipeline, source)})")


def _loader(of_pipeline: bool, source: str | None) -> str:
    if not of_pipeline:
        return "PeftModel.from_pretrained"
    second = source is not None and Path(source).name == "transformer_2"
    return "load_lora_weights of a diffusers pipeline" + (", load_into_transformer_2=True" if second else "")
