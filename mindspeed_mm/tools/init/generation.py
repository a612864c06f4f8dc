"""The file of a run that trains a diffusers transformer on captioned pictures or clips."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.files import read_json
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.data.generation.rule import GenerationRule
from mindspeed_mm.models.generation.predictor.family import find_predictor_family
from mindspeed_mm.models.generation.sora_model import generation_rule
from mindspeed_mm.tools.init.captions import MeasuredClips
from mindspeed_mm.tools.init.choices import (
    LORA_FLAGS,
    BatchSizes,
    Tuning,
    choose_batches,
    choose_rate,
    choose_tuning,
    count_in_words,
    recompute_flags,
    tokens_at_once,
)
from mindspeed_mm.tools.init.commented import commented_yaml
from mindspeed_mm.tools.init.machine import Machine
from mindspeed_mm.tools.init.model_directory import PIPELINE, ModelDirectory
from mindspeed_mm.utils.errors import ConfigError

#: largest picture in pixels, on the host and on a device, and most frames of a clip
_AREA = (256 * 256, 1024 * 1024)
_FRAMES = 81
#: pictures whose sides differ by more than this factor from their bucket's are left out
_ASPECT = 2.0
_PASSES = 4
_DROPPED = 0.1


@dataclass(frozen=True)
class GenerationPlan:
    """What is decided about a run.

    Attributes:
        model: the pipeline's directory.
        task: t2i, t2v, i2v or ti2v.
        rule: the shapes that the model takes.
        clips: the measured rows.
        machine: where it is meant to run.
        from_scratch: begin with a transformer of random weights.
        save: the run folder.
        tuning: what is trained.
        batches: sizes of batches.
        shape: keys of `preprocess_parameters` that decide the shapes of samples.
    """

    model: ModelDirectory
    task: str
    rule: GenerationRule
    clips: MeasuredClips
    machine: Machine
    from_scratch: bool
    save: str
    tuning: Tuning
    batches: BatchSizes
    shape: dict[str, Any]


def task_of(model: ModelDirectory) -> str:
    """Return what a pipeline is trained for.

    Raises:
        ConfigError: no family has its transformer, or the pipeline is for another task than its family is trained for.
    """
    family = find_predictor_family(None, model.model_type, f"--model '{model.path}'")
    name = read_json(Path(model.path) / PIPELINE).get("_class_name")
    tasks = [task for task, pipeline in family.pipelines.items() if pipeline == name]
    if not tasks:
        raise ConfigError(
            f"--model '{model.path}' is a {name}; {family.names[0]} is trained for "
            f"{', '.join(f'{task} ({pipeline})' for task, pipeline in family.pipelines.items())}"
        )
    expands = read_json(Path(model.path) / PIPELINE).get("expand_timesteps")
    return "ti2v" if "ti2v" in tasks and expands else tasks[0]


def plan_generation(
    model: ModelDirectory,
    task: str,
    clips: MeasuredClips,
    machine: Machine,
    *,
    save: str,
    lora: bool,
    from_scratch: bool,
) -> GenerationPlan:
    """Decide what the run's file says.

    Raises:
        ConfigError: the rows are clips, and the model makes pictures.
    """
    if task == "t2i" and not clips.are_pictures:
        raise ConfigError(
            f"--data {clips.files.form}: {sum(frames > 1 for frames in clips.frames)} rows are clips, and "
            f"{model.model_type} of --model '{model.path}' makes pictures; give pictures, or a model of videos"
        )
    described = SoRAModelConfig.from_dict({"init_from_diffusers": model.path, "task": task}, file="run.yaml")
    rule = generation_rule(described, seed=0)
    stored = read_json(Path(model.path) / "transformer" / "config.json")
    beside = max(0, model.stored_bytes - _stored(model))
    tuning = choose_tuning(model.parameters, machine, asked=lora, beside=beside)
    shape = _shape(clips, rule, machine)
    tokens = rule.tokens(shape["num_frames"], *_sides(shape, rule))
    hidden, layers = _hidden(stored), int(stored.get("num_layers", 1)) + int(stored.get("num_single_layers", 0) or 0)
    most = max(tokens, tokens_at_once(model.parameters, hidden, layers, machine, is_lora=tuning.is_lora))
    batches = choose_batches(clips.usable, tokens, machine, most=most, passes=_PASSES)
    return GenerationPlan(model, task, rule, clips, machine, from_scratch, save, tuning, batches, shape)


def _stored(model: ModelDirectory) -> int:
    return sum(file.stat().st_size for file in (Path(model.path) / "transformer").glob("*.safetensors"))


def _hidden(config: dict[str, Any]) -> int:
    return int(config.get("num_attention_heads", 24)) * int(config.get("attention_head_dim", 128))


def _shape(clips: MeasuredClips, rule: GenerationRule, machine: Machine) -> dict[str, Any]:
    """The keys of one size, where all pictures have it, or of buckets of several aspect ratios and one area."""
    largest = _AREA[not machine.is_host]
    frames = 1 if clips.are_pictures else rule.frames_near(min(_FRAMES, *(n for n in clips.frames if n > 1)))
    area = min(largest, clips.area)
    unit = rule.spatial_multiple
    if len(clips.sizes) == 1:
        height, width = next(iter(clips.sizes))
        scale = min(1.0, math.sqrt(largest / (height * width)))
        sides = [max(unit, int(side * scale + 1e-6) // unit * unit) for side in (height, width)]
        return {"num_frames": frames, "max_height": sides[0], "max_width": sides[1]}
    area = max(area, unit * unit)
    side = max(unit, int(math.sqrt(area)) // unit * unit)
    return {
        "num_frames": frames,
        "max_height": side,
        "max_width": side,
        "force_resolution": False,
        "max_hxw": area,
        "hw_aspect_thr": _ASPECT,
    }


def _sides(shape: dict[str, Any], rule: GenerationRule) -> tuple[int, int]:
    return shape["max_height"], shape["max_width"]


def write_generation(plan: GenerationPlan) -> str:
    """Return the text of the run's file."""
    content = {"gpt_args": _flags(plan), "model": _model(plan), "data": _data(plan), "fsdp2": {"sharding_size": "auto"}}
    above, after = _comments(plan)
    return commented_yaml(_heading(plan), content, above, after)


def _flags(plan: GenerationPlan) -> dict[str, Any]:
    batches, machine = plan.batches, plan.machine
    flags: dict[str, Any] = {"micro_batch_size": batches.micro, "global_batch_size": batches.whole}
    flags |= {"train_epochs": batches.epochs, "lr": choose_rate(plan.model.parameters, is_lora=plan.tuning.is_lora)}
    flags |= {"lr_decay_style": "cosine", "lr_warmup_fraction": 0.05}
    if not machine.is_host:
        flags["bf16"] = True
    flags |= recompute_flags(plan.model.parameters, machine)
    if plan.tuning.is_lora:
        flags |= LORA_FLAGS
    flags |= {"save": plan.save}
    if batches.save_interval is not None:
        flags |= {"save_interval": batches.save_interval, "save_total_limit": 2}
    return flags | {"save_hf": True}


def _model(plan: GenerationPlan) -> dict[str, Any]:
    content: dict[str, Any] = {"task": plan.task, "init_from_diffusers": plan.model.path}
    if plan.from_scratch:
        content["predictor"] = {"train_from_scratch": True}
        if plan.model.has_weights:
            content["predictor"]["ignore_weights"] = True
    return content


def _data(plan: GenerationPlan) -> dict[str, Any]:
    files = plan.clips.files
    basic: dict[str, Any] = {"data_path": files.paths[0] if len(files.paths) == 1 else list(files.paths)}
    if files.folder:
        basic["data_folder"] = files.folder
    basic["on_bad_sample"] = "skip" if files.skips else "raise"
    param = {
        "dataset_type": "t2i" if plan.clips.are_pictures else ("i2v" if plan.task in ("i2v", "ti2v") else "t2v"),
        "basic_parameters": basic,
        "preprocess_parameters": {**plan.shape, "cfg": _DROPPED},
    }
    return {"dataset_param": param}


def model_line(plan: GenerationPlan) -> str:
    """Return a line about the model."""
    model = plan.model
    return f"{model.model_type} ({plan.task}), {count_in_words(model.parameters)} parameters, of {model.path}"


def clips_lines(clips: MeasuredClips) -> list[str]:
    """Return lines about the rows."""
    looked = "" if clips.looked_at == clips.rows else f" ({clips.looked_at} of them looked at)"
    left = f"; {clips.left_out} left out" if clips.left_out else ""
    kind = "pictures" if clips.are_pictures else f"clips of {min(clips.frames)} to {max(clips.frames)} frames"
    if len(clips.sizes) == 1:
        height, width = next(iter(clips.sizes))
        size = f"all of {width} × {height} pixels"
    else:
        size = f"of {len(clips.sizes)} sizes, about {math.sqrt(clips.area):.0f}² pixels"
    return [f"{clips.rows} captioned {kind}{looked}{left}, {size}: {clips.files.form}"]


def _heading(plan: GenerationPlan) -> list[str]:
    return [
        model_line(plan),
        *clips_lines(plan.clips),
        f"Made for {plan.machine}.",
        "",
        f"mindspeed-mm dry-run {plan.save}    what this file trains, without devices",
        f"mindspeed-mm train {plan.save}      train; section.key=value after it changes a value of this file",
        "",
        "Keys of gpt_args are flags, the other sections are model.json, data.json and fsdp2.yaml; all of them, with",
        "their defaults, are in docs/configuration.md. Paths are relative to the folder in which it is started.",
    ]


def _comments(plan: GenerationPlan) -> tuple[dict[str, str], dict[str, list[str]]]:
    batches, shape = plan.batches, plan.shape
    tokens = plan.rule.tokens(shape["num_frames"], *_sides(shape, plan.rule))
    count = count_in_words(plan.model.parameters)
    preprocess = "data.dataset_param.preprocess_parameters"
    above = {
        "gpt_args.micro_batch_size": f"Samples of a device at once, and of a step: {batches.steps_per_epoch} "
        f"steps an epoch, {batches.steps} in all. Each epoch draws other noise.",
        "gpt_args.lr": f"A usual rate for {'adapters of ' if plan.tuning.is_lora else ''}{count} parameters; "
        f"{plan.tuning.why}.",
        "gpt_args.save": "Checkpoints, metrics and what is exported: hf/, "
        + ("adapters for load_lora_weights." if plan.tuning.is_lora else "a whole pipeline for DiffusionPipeline."),
        "model.task": "The transformer is trained; the pipeline's autoencoder and text encoders stay as they are.",
        f"{preprocess}.num_frames": "Frames and pixels of samples: pictures are scaled to cover them, and cut. "
        f"{tokens} tokens each; sides are multiples of {plan.rule.spatial_multiple}.",
        f"{preprocess}.cfg": "Share of captions that are left out, so that guidance can be used.",
        "fsdp2": "The transformer is sharded over all devices, each block (found by itself) being a unit.",
    }
    if "force_resolution" in shape:
        above[f"{preprocess}.force_resolution"] = (
            "Pictures differ: each goes to the nearest of several aspect ratios, of at most so many pixels."
        )
    after: dict[str, list[str]] = {}
    if "recompute_granularity" in (flags := _flags(plan)):
        above["gpt_args.recompute_granularity"] = "Compute blocks again in backward, in place of keeping activations."
    if "bf16" in flags:
        above["gpt_args.bf16"] = "Compute in bfloat16, over float32 weights."
    else:
        after["gpt_args"] = ["Computed in float32, as this is a CPU; on a device: bf16: true"]
    if plan.clips.files.beside:
        above["data.dataset_param.basic_parameters.data_path"] = (
            "Made of the .txt files beside the pictures, which are not read again."
        )
    return above, after
