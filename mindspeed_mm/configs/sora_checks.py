"""Checks of a generation model's model.json, alone and against data.json, before anything is built."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.configs.files import describe_missing
from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.configs.sora_config import AeConfig, SoRAModelConfig


def check_generation_model(config: SoRAModelConfig, *, has_checkpoint: bool = False) -> list[str]:
    """Return what keeps a model.json from being trained: missing weights and directories, reversed boundaries.

    Args:
        config: model.json.
        has_checkpoint: --load names something that is there.
    """
    problems = [*_whole_pipeline(config), *_predictor(config, has_checkpoint), *_timesteps(config)]
    if not config.load_video_features:
        problems += [*_autoencoder(config), *_image_encoder(config)]
    if not config.load_text_features:
        problems += _text_encoders(config)
    return problems


def check_generation_files(model: SoRAModelConfig, data: GenerationDataConfig) -> list[str]:
    """Return where model.json and data.json disagree about whether the data are features extracted in advance."""
    kind, key = data.dataset_param.dataset_type, f"{data.file}: 'dataset_param.dataset_type'"
    loads = {"load_video_features": model.load_video_features, "load_text_features": model.load_text_features}
    on = [f"'{name}'" for name, value in loads.items() if value]
    if kind == "feature" and not model.load_video_features:
        return [
            f"{key} is 'feature', latents of clips that are encoded already, but 'load_video_features' is false in "
            f"{model.file}; write true (and load_text_features for captions that are encoded too), or the dataset type "
            "of clips: t2v, i2v, t2i"
        ]
    if kind != "feature" and on:
        are = "is" if len(on) == 1 else "are"
        return [
            f"{model.file}: {' and '.join(on)} {are} true, but {key} is {show(kind)}, whose clips and captions are "
            'still to be encoded; write false, or "dataset_type": "feature" for what feature_extraction made'
        ]
    return []


def _whole_pipeline(config: SoRAModelConfig) -> list[str]:
    directory, key = config.init_from_diffusers, "init_from_diffusers"
    if directory is None:
        return []
    problems = _directory_problem(config.file, key, directory, "model_index.json", "a diffusers pipeline")
    if problems:
        return problems
    needed = {
        "transformer": config.predictor.from_pretrained is None and config.predictor.config is None,
        "vae": not config.load_video_features and (config.ae is None or _is_of_pipeline(config.ae)),
        "text_encoder": not config.load_text_features and not config.text_encoder,
    }
    missing = [part for part, is_needed in needed.items() if is_needed and not (Path(directory) / part).is_dir()]
    if not missing:
        return []
    return [
        f"{config.file}: '{key}' '{directory}' has no folder {' and no folder '.join(missing)}; download the whole "
        "pipeline, or name the part's own directory (from_pretrained of predictor, ae, text_encoder)"
    ]


def _is_of_pipeline(ae: AeConfig) -> bool:
    return ae.model_id != "pixel" and ae.from_pretrained is None


def _predictor(config: SoRAModelConfig, has_checkpoint: bool) -> list[str]:
    described = config.predictor
    if described.from_pretrained is not None:
        key = "predictor.from_pretrained"
        of = "a diffusers transformer (the folder transformer of a pipeline)"
        return _directory_problem(config.file, key, described.from_pretrained, "config.json", of)
    from_pipeline = config.init_from_diffusers is not None and described.config is None
    if from_pipeline or described.train_from_scratch or has_checkpoint:
        return []
    return [
        f"{config.file}: there are no weights to start from: give 'predictor.from_pretrained' (the folder transformer "
        "of a diffusers pipeline), 'init_from_diffusers' (the whole pipeline), --load (a checkpoint or such a folder), "
        'or "train_from_scratch": true inside predictor for random ones'
    ]


def _timesteps(config: SoRAModelConfig) -> list[str]:
    diffusion, problems = config.diffusion, _boundaries(config)
    if diffusion.model_id == "wan_flow_match_scheduler" and diffusion.density not in (None, "uniform"):
        key = "sampling" if diffusion.sampling else "snr"
        problems.append(
            f"{config.file}: 'diffusion.{key}' is {show(getattr(diffusion, key))}, but wan_flow_match_scheduler draws "
            'steps of its table evenly; write "model_id": "flow_matching" for other densities, or uniform'
        )
    if (
        diffusion.sampling
        and diffusion.snr
        and {"lognorm": "logit_normal"}.get(diffusion.snr, diffusion.snr) != diffusion.sampling
    ):
        problems.append(
            f"{config.file}: 'diffusion.sampling' is {show(diffusion.sampling)} and 'diffusion.snr' "
            f"{show(diffusion.snr)}; they say the same thing, keep one of them"
        )
    return problems


def _boundaries(config: SoRAModelConfig) -> list[str]:
    low, high = config.diffusion.min_timestep_boundary, config.diffusion.max_timestep_boundary
    if low < high:
        return []
    return [
        f"{config.file}: 'diffusion.min_timestep_boundary' {low:g} is not below 'diffusion.max_timestep_boundary' "
        f"{high:g}; timesteps are drawn from the one (0: all noise) to the other (1: none)"
        + ("; exchange them" if low > high else "")
    ]


def _autoencoder(config: SoRAModelConfig) -> list[str]:
    ae = config.ae
    if ae is not None and (ae.model_id == "pixel" or ae.from_pretrained is not None):
        if ae.from_pretrained is None:
            return []
        of = "a diffusers autoencoder (the folder vae of a pipeline)"
        path = Path(ae.from_pretrained)
        if path.suffix == ".safetensors" and path.is_file():
            return []  # its class and its tensors are checked where it is read
        return _directory_problem(config.file, "ae.from_pretrained", ae.from_pretrained, "config.json", of)
    if config.init_from_diffusers is not None:
        return []
    key = "ae" if ae is None else "ae.from_pretrained"
    return [
        f"{config.file}: '{key}' is missing: the diffusers directory of the autoencoder that makes latents of clips; "
        '"model_id": "pixel" trains on pixels, and "load_video_features": true on latents made before'
    ]


def _image_encoder(config: SoRAModelConfig) -> list[str]:
    encoder = config.first_frame_encoder
    if encoder is None or (encoder.from_pretrained is None and config.init_from_diffusers is not None):
        return []
    key = "image_encoder.from_pretrained"
    published = config.ae.i2v_processor if config.ae is not None else None
    places = (published.image_encoder, published.processor_path) if published is not None else ()
    if published is not None and encoder.from_pretrained is not None and encoder.from_pretrained in places:
        key = f"ae.i2v_processor.{'image_encoder' if published.image_encoder else 'processor_path'}"
    if encoder.from_pretrained is None:
        return [f"{config.file}: '{key}' is missing: the directory of the encoder of the first frame"]
    return _directory_problem(config.file, key, encoder.from_pretrained, "config.json", "a transformers model")


def _text_encoders(config: SoRAModelConfig) -> list[str]:
    if not config.text_encoder and config.init_from_diffusers is None:
        return [
            f"{config.file}: 'text_encoder' is missing: the directory of what encodes captions (from_pretrained); "
            '"load_text_features": true trains on text states made before'
        ]
    problems = []
    for number, encoder in enumerate(config.text_encoder):
        key = "text_encoder" if len(config.text_encoder) == 1 else f"text_encoder[{number}]"
        if encoder.from_pretrained is not None:
            problems += _directory_problem(
                config.file, f"{key}.from_pretrained", encoder.from_pretrained, "config.json", "a transformers model"
            )
        elif config.init_from_diffusers is None:
            problems.append(f"{config.file}: '{key}.from_pretrained' is missing: the directory of the encoder")
        if encoder.byT5_ckpt_path is not None and not Path(encoder.byT5_ckpt_path).is_file():
            problems.append(f"{config.file}: '{key}.byT5_ckpt_path': {describe_missing(encoder.byT5_ckpt_path)}")
        if encoder.tokenizer is not None and not Path(encoder.tokenizer).is_dir():
            problems.append(f"{config.file}: '{key}.tokenizer': {describe_missing_model(encoder.tokenizer)}")
    return problems


def _directory_problem(file: str, key: str, directory: str, expected: str, of: str) -> list[str]:
    path = Path(directory)
    if not path.exists():
        return [f"{file}: '{key}': {describe_missing_model(directory)}"]
    if path.is_file():
        beside = f"; '{path.parent}' holds one" if (path.parent / expected).is_file() else ""
        return [f"{file}: '{key}' '{directory}' is a file; expected the directory of {of}, with {expected}{beside}"]
    if not (path / expected).is_file():
        inside = next((p.parent for p in sorted(path.glob(f"*/{expected}"))), None)
        near = f"; '{inside}' has one" if inside is not None and expected == "config.json" else ""
        return [f"{file}: '{key}' '{directory}' has no {expected}; expected the directory of {of}{near}"]
    return []
