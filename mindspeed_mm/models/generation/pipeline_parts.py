"""The diffusers pipeline around a trained predictor, for exports that sample by themselves."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.models.common.pipeline_layout import INDEX, PipelineLayout
from mindspeed_mm.models.generation.ae.autoencoder import open_file
from mindspeed_mm.models.generation.ae.weights_file import directory_of, is_lone_file
from mindspeed_mm.models.generation.diffusion.objective import Objective
from mindspeed_mm.models.generation.parts import image_processor_directory
from mindspeed_mm.models.generation.predictor.family import PredictorFamily
from mindspeed_mm.models.generation.text_encoder.captions import component_name, tokenizer_directory
from mindspeed_mm.utils.log import notice


def pipeline_layout(
    config: SoRAModelConfig,
    family: PredictorFamily,
    objective: Objective,
    tokenizers: list[str | None],
    built: Path,
) -> PipelineLayout | None:
    """Return where each part of the pipeline lies; None, and a notice, if model.json doesn't name them all.

    Args:
        config: model.json.
        family: family of the predictor.
        objective: its scheduler is exported if no whole pipeline has one.
        tokenizers: directories named in data.json.
        built: an empty folder for parts without a directory (a scheduler, an autoencoder of pixels).
    """
    import diffusers

    pipeline_class = getattr(diffusers, family.pipelines[family.task])
    takes = {n: p for n, p in inspect.signature(pipeline_class.__init__).parameters.items() if n != "self"}
    whole = Path(config.init_from_diffusers) if config.init_from_diffusers else None
    index: dict[str, Any] = {}
    if whole is not None and (whole / INDEX).is_file():
        index = json.loads((whole / INDEX).read_text(encoding="utf-8"))
    index.update({"_class_name": pipeline_class.__name__, "_diffusers_version": diffusers.__version__})
    others: dict[str, Path] = {}
    for name, parameter in takes.items():
        entry = index.get(name)
        found = _part(name, config, family, tokenizers, built, whole)
        if name == "transformer":
            index[name] = ["diffusers", family.model_class_name]
        elif name == "scheduler" and found is None:
            scheduler = objective.sampling_scheduler()
            scheduler.save_pretrained(built / name)
            others[name], index[name] = built / name, ["diffusers", type(scheduler).__name__]
        elif name == "guider" and found is None:
            diffusers.ClassifierFreeGuidance().save_pretrained(built / name)
            others[name], index[name] = built / name, ["diffusers", "ClassifierFreeGuidance"]
        elif name == "expand_timesteps":
            index[name] = family.task == "ti2v"
        elif found is not None:
            others[name] = found
            index[name] = entry if isinstance(entry, list) and entry[0] else _class_of(found, name)
        elif name == "transformer_2" or parameter.default is not inspect.Parameter.empty:
            is_part = name in pipeline_class._optional_components
            index.setdefault(name, [None, None] if is_part else parameter.default)
        else:
            notice(
                f"exports hold the trained transformer only: {config.file} doesn't say where the {name} of "
                f"{pipeline_class.__name__} is"
            )
            return None
    return PipelineLayout("transformer", others, index)


def _part(
    name: str,
    config: SoRAModelConfig,
    family: PredictorFamily,
    tokenizers: list[str | None],
    built: Path,
    whole: Path | None,
) -> Path | None:
    """Return the directory of a part as model.json, data.json or the whole pipeline names it."""
    beside = whole / name if whole is not None and (whole / name).is_dir() else None
    if name == "vae" and config.ae is not None:
        if config.ae.model_id == "pixel":
            from mindspeed_mm.models.generation.ae.pixel import PixelAutoencoder

            with torch.device("cpu"):
                PixelAutoencoder(**(config.ae.config or {})).save_pretrained(built / name)
            return built / name
        if config.ae.from_pretrained is None:
            return beside
        place = directory_of(Path(config.ae.from_pretrained))
        if is_lone_file(place):
            open_file(place, config.ae, config.file, default_class=family.defaults.ae).save_pretrained(built / name)
            return built / name
        return place
    for number, encoder in enumerate(config.text_encoder):
        directory = encoder.from_pretrained or (str(whole / component_name("text_encoder", number)) if whole else None)
        if directory is None:
            continue
        if name == component_name("text_encoder", number):
            return Path(directory)
        if name == component_name("tokenizer", number):
            stated = encoder.tokenizer or (tokenizers[number] if number < len(tokenizers) else None)
            return tokenizer_directory(stated, Path(directory), name, config.file, number)
    if name in ("image_encoder", "image_processor", "feature_extractor"):
        described = config.first_frame_encoder
        if described is not None and described.from_pretrained:
            vision = Path(described.from_pretrained)
            return vision if name == "image_encoder" else image_processor_directory(vision) or beside
    return beside


def _class_of(directory: Path, name: str) -> list[str]:
    """Return library and class of a part as its files state them."""
    if name.startswith("tokenizer"):
        from transformers import AutoTokenizer

        return ["transformers", type(AutoTokenizer.from_pretrained(str(directory))).__name__]
    if name in ("image_processor", "feature_extractor"):
        stated = json.loads((directory / "preprocessor_config.json").read_text(encoding="utf-8"))
        return ["transformers", stated.get("image_processor_type") or stated["feature_extractor_type"]]
    file = next(p for p in (directory / "config.json", directory / "scheduler_config.json") if p.is_file())
    stated = json.loads(file.read_text(encoding="utf-8"))
    if stated.get("_class_name") == "PixelAutoencoder":
        return ["mindspeed_mm.models.generation.ae.pixel", "PixelAutoencoder"]
    if "_class_name" in stated:
        return ["diffusers", stated["_class_name"]]
    return ["transformers", stated["architectures"][0]]
