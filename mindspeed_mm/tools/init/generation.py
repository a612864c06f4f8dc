"""The file of a run that trains a diffusers transformer on captioned pictures or clips."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.files import read_json
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.configs.working_directory import WORKING_DIRECTORY
from mindspeed_mm.data.generation.rule import GenerationRule
from mindspeed_mm.models.generation.predictor.family import find_predictor_family
from mindspeed_mm.models.generation.sora_model import generation_rule
from mindspeed_mm.tools.init.captions import MeasuredClips
from mindspeed_mm.tools.init.choices import choose_batches, choose_tuning, count_in_words, tokens_at_once
from mindspeed_mm.tools.init.commented import commented_yaml
from mindspeed_mm.tools.init.machine import Machine
from mindspeed_mm.tools.init.model_directory import PIPELINE, ModelDirectory
from mindspeed_mm.tools.init.training import After, Training
from mindspeed_mm.utils.errors import ConfigError

#: largest picture in pixels, on the host and on a device, and most frames of a clip
_AREA = (256 * 256, 1024 * 1024)
_FRAMES = 81
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
        training: how it is trained.
        from_scratch: begin with a transformer of random weights.
        shape: keys of `preprocess_parameters` that decide the shapes of samples.
        largest: frames, height and width of the largest of them.
    """

    model: ModelDirectory
    task: str
    rule: GenerationRule
    clips: MeasuredClips
    training: Training
    from_scratch: bool
    shape: dict[str, Any]
    largest: tuple[int, int, int]

    @property
    def title(self) -> str:
        """A line about the model."""
        model = self.model
        return f"{model.model_type} ({self.task}), {count_in_words(model.parameters)} parameters, of {model.path}"

    @property
    def tokens(self) -> int:
        """Tokens of the largest sample."""
        return self.rule.tokens(*self.largest)


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
    shape, largest = _shape(clips, rule, machine)
    tokens = rule.tokens(*largest)
    hidden, layers = _hidden(stored), int(stored.get("num_layers", 1)) + int(stored.get("num_single_layers", 0) or 0)
    most = max(tokens, tokens_at_once(model.parameters, hidden, layers, machine, is_lora=tuning.is_lora))
    batches = choose_batches(clips.usable, tokens, machine, most=most, passes=_PASSES)
    training = Training(model.parameters, machine, tuning, batches, save)
    return GenerationPlan(model, task, rule, clips, training, from_scratch, shape, largest)


def _stored(model: ModelDirectory) -> int:
    return sum(file.stat().st_size for file in (Path(model.path) / "transformer").glob("*.safetensors"))


def _hidden(config: dict[str, Any]) -> int:
    return int(config.get("num_attention_heads", 24)) * int(config.get("attention_head_dim", 128))


def _shape(clips: MeasuredClips, rule: GenerationRule, machine: Machine) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """The keys of one size, or of buckets of several aspect ratios and one area; and the largest shape."""
    frames = 1 if clips.are_pictures else rule.frames_near(min(_FRAMES, *(n for n in clips.frames if n > 1)))
    unit = rule.spatial_multiple
    area = max(min(_AREA[machine.has_devices], clips.area), unit * unit)
    aspect = 1.0
    if len(clips.sizes) == 1:
        height, width = next(iter(clips.sizes))
        aspect = height / width
    sides = [math.sqrt(area * aspect), math.sqrt(area / aspect)]
    height, width = (max(unit, int(side + 1e-6) // unit * unit) for side in sides)
    largest = (frames, height, width)
    if not clips.are_pictures and min(clips.frames) == 1:
        return {"buckets": [[frames, height, width], [1, height, width]]}, largest
    shape: dict[str, Any] = {"num_frames": frames, "max_height": height, "max_width": width}
    if len(clips.sizes) > 1:
        shape |= {"force_resolution": False, "max_hxw": area}
    return shape, largest


def write_generation(plan: GenerationPlan) -> str:
    """Return the text of the run's file."""
    content = {
        WORKING_DIRECTORY: os.getcwd(),
        "gpt_args": plan.training.flags(),
        "model": _model(plan),
        "data": _data(plan),
        "fsdp2": {"sharding_size": "auto"},
    }
    heading = plan.training.heading([plan.title, *clips_lines(plan.clips)])
    return commented_yaml(heading, content, *_comments(plan))


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
    if validation := plan.training.batches.validation:
        basic["val_rate"] = round(validation / plan.clips.usable, 4)
    param = {
        "dataset_type": "t2i" if plan.clips.are_pictures else ("i2v" if plan.task in ("i2v", "ti2v") else "t2v"),
        "basic_parameters": basic,
        "preprocess_parameters": {**plan.shape, "cfg": _DROPPED},
    }
    return {"dataset_param": param}


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


def _comments(plan: GenerationPlan) -> tuple[dict[str, str], After]:
    is_lora = plan.training.tuning.is_lora
    above, after = plan.training.comments(
        "samples", "adapters for load_lora_weights" if is_lora else "a whole pipeline for DiffusionPipeline"
    )
    preprocess = "data.dataset_param.preprocess_parameters"
    above |= {
        "gpt_args.train_epochs": "Each epoch draws other noise.",
        "model.task": "The transformer is trained; the pipeline's autoencoder and text encoders stay as they are.",
        f"{preprocess}.{next(iter(plan.shape))}": "Frames and pixels that pictures are scaled to, and cut to; "
        f"at most {plan.tokens} tokens. Sides are multiples of {plan.rule.spatial_multiple}.",
        f"{preprocess}.cfg": "Share of captions that are left out, so that guidance can be used.",
        "fsdp2": "The transformer is sharded over all devices, each block (found by itself) being a unit.",
    }
    if plan.training.batches.validation:
        above["gpt_args.eval_interval"] = "An evaluation an epoch, on the share val_rate of the rows, below."
    if "force_resolution" in plan.shape:
        above[f"{preprocess}.force_resolution"] = (
            "Pictures differ: each goes to the nearest of several aspect ratios, of at most so many pixels."
        )
    if plan.clips.files.beside:
        above["data.dataset_param.basic_parameters.data_path"] = (
            "Made of the .txt files beside the pictures, which are not read again."
        )
    return above, after
