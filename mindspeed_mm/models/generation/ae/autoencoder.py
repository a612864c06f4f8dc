"""A frozen autoencoder: it encodes clips into normalised latents, and decodes those."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.configs.hf_directory import hub_advice
from mindspeed_mm.configs.sora_config import AeConfig
from mindspeed_mm.models.generation.ae.tiling import enable_tiling
from mindspeed_mm.models.generation.ae.weights_file import class_and_structure, directory_of, is_lone_file, load_file
from mindspeed_mm.utils.device import move_to_device
from mindspeed_mm.utils.dtypes import to_torch_dtype
from mindspeed_mm.utils.errors import CheckpointError, ConfigError, DataError, did_you_mean

#: published name → diffusers class
PUBLISHED_AUTOENCODERS = {
    "wan_video_vae": "AutoencoderKLWan",
    "hunyuanvideo_15_vae": "AutoencoderKLHunyuanVideo15",
    "autoencoder_kl_hunyuanvideo": "AutoencoderKLHunyuanVideo",
    "flux_vae": "AutoencoderKL",
}
CLASSES = (
    "AutoencoderKL",
    "AutoencoderKLCogVideoX",
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLHunyuanVideo15",
    "AutoencoderKLLTXVideo",
    "AutoencoderKLQwenImage",
    "AutoencoderKLWan",
)


@dataclass(frozen=True)
class Encoded:
    """The posterior of a clip, normalised.

    Attributes:
        mean: [batch, channels, latent frames, latent height, latent width] float32.
        std: its standard deviation, shaped alike; None where latents are not to be drawn.
    """

    mean: torch.Tensor
    std: torch.Tensor | None = None


class Autoencoder:
    """Wraps a diffusers autoencoder.

    Latents are normalised as the pipelines of its family undo it: (latent - mean) · scale / deviation by channel, or
    (latent - shift) · scale.

    Attributes:
        model: the diffusers model.
        temporal_stride, spatial_stride: frames and pixels that a latent stands for.
    """

    def __init__(self, model: Any, config: AeConfig) -> None:
        self.model = model
        self._config = config
        self.temporal_stride, self.spatial_stride = _strides(model)
        self._of_images = type(model).__name__ == "AutoencoderKL"
        self._shift, self._scale = _normalisation(model, config)
        if config.enable_tiling or config.use_tiling:
            enable_tiling(model, config.tiling_param, self.spatial_stride, "model.json: ae")

    @property
    def channels(self) -> int:
        """Number of channels of a latent."""
        settings = self.model.config
        return int(settings.get("latent_channels") or settings.get("z_dim"))

    def to(self, device: torch.device) -> Autoencoder:
        """Move the model to a device."""
        self.model.to(device)
        return self

    @torch.no_grad()
    def encode(self, video: torch.Tensor) -> Encoded:
        """Encode clips.

        Args:
            video: [batch, 3, frames, height, width] in [-1, 1]; frames are k · temporal_stride + 1, height and width
                multiples of spatial_stride.

        Raises:
            DataError: another shape.
        """
        self._check(*video.shape[2:])
        device, dtype = self.model.device, self.model.dtype
        video = video.to(device, dtype)
        posterior = self.model.encode(video[:, :, 0] if self._of_images else video).latent_dist
        mean = self._normalised(posterior.mean.float(), shift=True)
        if not self._config.do_sample:
            return Encoded(mean)
        return Encoded(mean, self._normalised(posterior.std.float(), shift=False))

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode normalised latents: [batch, channels, …] → [batch, 3, frames, height, width] float32."""
        shift, scale = (move_to_device(value, latents.device) for value in (self._shift, self._scale))
        raw = (latents.float() / scale + shift).to(self.model.device, self.model.dtype)
        extra = {"temb": raw.new_zeros(len(raw))} if self.model.config.get("timestep_conditioning") else {}
        video = self.model.decode(raw[:, :, 0] if self._of_images else raw, return_dict=False, **extra)[0]
        return (video[:, :, None] if self._of_images else video).float()

    def _check(self, frames: int, height: int, width: int) -> None:
        name = type(self.model).__name__
        stride = self.temporal_stride
        if self._of_images and frames != 1:
            raise DataError(f"{name} encodes pictures, and a sample has {frames} frames; expected 1")
        if (frames - 1) % stride:
            fewer = (frames - 1) // stride * stride + 1
            raise DataError(
                f"{name} encodes clips of {stride} · k + 1 frames, and a sample has {frames}; the nearest numbers are "
                f"{fewer} and {fewer + stride}"
            )
        multiple = self.spatial_stride
        for side, pixels in (("height", height), ("width", width)):
            if pixels % multiple:
                less = pixels // multiple * multiple
                near = f"{less} and {less + multiple}" if less else str(multiple)
                raise DataError(
                    f"{name} encodes pictures whose sides are multiples of {multiple} pixels, and a sample's {side} is "
                    f"{pixels}; nearest: {near}"
                )

    def _normalised(self, value: torch.Tensor, *, shift: bool) -> torch.Tensor:
        value = value[:, :, None] if value.dim() == 4 else value
        if shift:
            value = value - move_to_device(self._shift, value.device)
        return value * move_to_device(self._scale, value.device)


def open_autoencoder(
    config: AeConfig, file: str, *, default_class: str = "", directory: Path | None = None
) -> Autoencoder:
    """Load the autoencoder that model.json describes.

    Args:
        config: its `ae`.
        file: for messages.
        default_class: diffusers class if neither model.json nor the directory states one.
        directory: directory of a pipeline's autoencoder, used if `ae` names none.

    Raises:
        ConfigError: an unknown model_id, no directory.
        CheckpointError: the directory can't be loaded.
    """
    import diffusers

    name = PUBLISHED_AUTOENCODERS.get(config.model_id or "", config.model_id)
    dtype = to_torch_dtype(config.dtype) or torch.float32
    if name == "pixel":
        return Autoencoder(_pixel(config.config or {}, file).to(dtype), config)
    if name is not None and name not in CLASSES:
        known = ("pixel", *PUBLISHED_AUTOENCODERS, *CLASSES)
        raise ConfigError(
            f"{file}: 'ae.model_id' is '{config.model_id}'; expected one of {', '.join(known)}"
            f"{did_you_mean(name, known)}"
        )
    path = directory_of(Path(config.from_pretrained)) if config.from_pretrained else directory
    if path is None:
        raise ConfigError(f"{file}: 'ae.from_pretrained' is missing: the diffusers directory of the autoencoder")
    if is_lone_file(path):
        model = open_file(path, config, file, default_class=default_class).to(dtype)
        return Autoencoder(model.requires_grad_(False).eval(), config)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{file}: 'ae.from_pretrained' '{path}' has no config.json; expected a diffusers directory (the folder vae "
            f"of a pipeline){hub_advice(path)}"
        )
    class_name = diffusers.AutoModel.load_config(str(path)).get("_class_name") or name or default_class
    _check_class(class_name, config, path, file)
    try:
        model = _model_class(class_name).from_pretrained(str(path), dtype=dtype)
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{file}: the autoencoder '{path}' can't be loaded as {class_name}: {error}") from error
    model.requires_grad_(False)
    return Autoencoder(model.eval(), config)


def open_file(path: Path, config: AeConfig, file: str, *, default_class: str = "") -> Any:
    """Load the diffusers model of an autoencoder from a lone file of weights, in the file's dtype.

    Args, Raises: as `open_autoencoder`'s.
    """
    return _of_file(load_file, path, config, file, default_class)


def _of_file(
    make: Callable[[Path, Any, Mapping[str, Any], str], Any], path: Path, config: AeConfig, file: str, default: str
) -> Any:
    """Call `make` with a lone file, its diffusers class and the arguments of the constructor."""
    named = PUBLISHED_AUTOENCODERS.get(config.model_id or "", config.model_id)
    if named is not None and named not in CLASSES:
        _check_class(named, config, path, file)
    class_name, structure = class_and_structure(path, config, named, default, file)
    _check_class(class_name, config, path, file)
    try:
        return make(path, _model_class(class_name), structure, file)
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{file}: the structure that 'ae' states doesn't build a {class_name}: {error}") from error


def _on_meta(path: Path, model_class: Any, structure: Mapping[str, Any], file: str) -> Any:
    del path, file
    with torch.device("meta"):
        return model_class(**structure)


def _check_class(class_name: str, config: AeConfig, path: Path, file: str) -> None:
    name = PUBLISHED_AUTOENCODERS.get(config.model_id or "", config.model_id)
    if name is not None and class_name != name:
        raise ConfigError(
            f"{file}: 'ae.model_id' is '{config.model_id}' ({name}), but '{path}' holds a {class_name}; write what "
            "it holds, or leave model_id out"
        )
    if class_name not in (*CLASSES, "PixelAutoencoder"):
        raise ConfigError(f"{file}: '{path}' holds a {class_name}; expected one of {', '.join(CLASSES)}")


def _model_class(name: str) -> Any:
    if name == "PixelAutoencoder":
        from mindspeed_mm.models.generation.ae.pixel import PixelAutoencoder

        return PixelAutoencoder
    import diffusers

    return getattr(diffusers, name)


def _pixel(keys: dict[str, Any], file: str) -> Any:
    unknown = [key for key in keys if key != "channels"]
    if unknown:
        raise ConfigError(
            f"{file}: 'ae.config.{unknown[0]}' is no key of pixel; expected channels"
            f"{did_you_mean(unknown[0], ['channels'])}"
        )
    try:
        return _model_class("PixelAutoencoder")(**keys)
    except ValueError as error:
        raise ConfigError(f"{file}: 'ae.config': {error}") from error


def autoencoder_strides(
    config: AeConfig | None, directory: Path | None, fallback: tuple[int, int], default_class: str = ""
) -> tuple[int, int]:
    """Return the frames and pixels that a latent stands for, from the autoencoder's config.json alone.

    Args:
        config: model.json's `ae`.
        directory: directory of a pipeline's autoencoder, used if `ae` names none.
        fallback: where neither names a directory that is there.
        default_class: as `open_autoencoder`'s.

    Raises:
        ConfigError: the directory holds a class that encodes no images or videos here.
    """
    import diffusers

    if config is not None and config.model_id == "pixel":
        return 1, 1
    path = directory_of(Path(config.from_pretrained)) if config is not None and config.from_pretrained else directory
    if path is not None and config is not None and is_lone_file(path):
        return _strides(_of_file(_on_meta, path, config, "model.json", default_class))
    if path is None or not (path / "config.json").is_file():
        return fallback
    settings = diffusers.AutoModel.load_config(str(path))
    described = config or AeConfig()
    named = PUBLISHED_AUTOENCODERS.get(described.model_id or "", described.model_id)
    name = settings.get("_class_name") or named or default_class
    _check_class(name, described, path, "model.json")
    with torch.device("meta"):
        model = _model_class(name).from_config(settings)
    return _strides(model)


def _strides(model: Any) -> tuple[int, int]:
    """Return frames and pixels of a latent, from one of two pairs of names in the configuration, or computed."""
    settings = model.config
    if settings.get("scale_factor_temporal") and settings.get("scale_factor_spatial"):
        return int(settings["scale_factor_temporal"]), int(settings["scale_factor_spatial"])
    names = ("temporal_compression_ratio", "spatial_compression_ratio")
    temporal, spatial = (settings.get(name) or vars(model).get(name) for name in names)
    if temporal and spatial:
        return int(temporal), int(spatial)
    halvings = settings.get("temperal_downsample")
    if halvings is not None:  # AutoencoderKLWan, AutoencoderKLQwenImage
        return 2 ** sum(halvings), 2 ** len(halvings)
    return int(temporal or 1), 2 ** (len(settings["block_out_channels"]) - 1)


def _normalisation(model: Any, config: AeConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return shift and scale, broadcastable to [batch, channels, frames, height, width]."""
    settings = model.config
    zero, one = torch.zeros(1, 1, 1, 1, 1), torch.ones(1, 1, 1, 1, 1)
    if not config.norm_latents:
        return zero, one
    factor = config.scaling_factor if config.scaling_factor is not None else settings.get("scaling_factor")
    shift = config.shift_factor if config.shift_factor is not None else settings.get("shift_factor")
    means, deviations = settings.get("latents_mean"), settings.get("latents_std")
    if means is None:  # LTX keeps them as buffers
        buffers = dict(model.named_buffers(recurse=False))
        means, deviations = buffers.get("latents_mean"), buffers.get("latents_std")
    if means is not None and config.norm_mode != "shift_scale":
        mean = torch.as_tensor(means, dtype=torch.float32).view(1, -1, 1, 1, 1)
        deviation = torch.as_tensor(deviations, dtype=torch.float32).view(1, -1, 1, 1, 1)
        by_factor = float(factor or 1.0) if type(model).__name__ == "AutoencoderKLLTXVideo" else 1.0
        return mean, by_factor / deviation
    if config.norm_mode == "channel_specified_shift_scale":
        raise ConfigError(
            f"model.json: 'ae.norm_mode' is channel_specified_shift_scale, but the {type(model).__name__} has no "
            "latents_mean and latents_std; write shift_scale"
        )
    return one * float(shift or 0.0), one * float(factor or 1.0)
