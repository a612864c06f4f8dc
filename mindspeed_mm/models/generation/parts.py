"""The frozen parts of a generation model: they encode latents, text states and conditions, and are never trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.configs.hf_directory import hub_advice
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.configs.sora_config import AeConfig, ImageEncoderConfig, SoRAModelConfig
from mindspeed_mm.models.generation.ae.autoencoder import Autoencoder, open_autoencoder
from mindspeed_mm.models.generation.predictor.family import PredictorFamily
from mindspeed_mm.models.generation.text_encoder.captions import CaptionEncoder, open_captions
from mindspeed_mm.utils.device import move_to_device
from mindspeed_mm.utils.dtypes import to_torch_dtype
from mindspeed_mm.utils.errors import ConfigError

_PROCESSORS = ("image_processor", "feature_extractor")  # as pipelines call them


class FrozenImageEncoder:
    """A vision encoder of transformers with its image processor."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor
        self._on_host: torch.Tensor | None = None

    def expect(self, frames: torch.Tensor | None) -> None:
        """Set what the next call's frames are in host memory, where they are processed; None: only a device has them.

        Args:
            frames: [batch, 3, height, width].
        """
        self._on_host = frames

    @torch.no_grad()
    def hidden_states(self, frames: torch.Tensor, layer: int = -2) -> torch.Tensor:
        """Return the states of a layer, [batch, patches, width].

        Args:
            frames: [batch, 3, height, width] in [-1, 1].
        """
        outputs = self.model(self._pixels(frames), output_hidden_states=True)
        return outputs.hidden_states[layer]

    @torch.no_grad()
    def last_hidden_state(self, frames: torch.Tensor) -> torch.Tensor:
        """Return the states of the last layer after its norm, [batch, patches, width]."""
        return self.model(self._pixels(frames)).last_hidden_state

    def _pixels(self, frames: torch.Tensor) -> torch.Tensor:
        on_host, self._on_host = self._on_host, None
        frames = frames if on_host is None else on_host
        # through 8-bit images, as in a pipeline
        pictures = ((frames.float() / 2 + 0.5).clamp(0, 1) * 255).round().to("cpu", torch.uint8)
        pixels = self.processor(images=list(pictures), return_tensors="pt").pixel_values
        return move_to_device(pixels, self.model.device, self.model.dtype)


@dataclass
class FrozenParts:
    """The frozen parts; None where features extracted in advance take their place.

    Attributes:
        ae: autoencoder.
        captions: text encoders.
        image_encoder: encoder of the first frame.
    """

    ae: Autoencoder | None = None
    captions: CaptionEncoder | None = None
    image_encoder: FrozenImageEncoder | None = None

    def to(self, device: torch.device) -> None:
        """Move all parts to a device."""
        for part in (self.ae, self.captions, self.image_encoder.model if self.image_encoder else None):
            if part is not None:
                part.to(device)

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules of all parts."""
        found = [self.ae.model] if self.ae is not None else []
        found += self.captions.encoders if self.captions is not None else []
        return found + ([self.image_encoder.model] if self.image_encoder is not None else [])


def open_parts(
    config: SoRAModelConfig,
    family: PredictorFamily,
    tokenizers: Sequence[str | None] = (),
    *,
    needs_video: bool = True,
    needs_text: bool = True,
) -> FrozenParts:
    """Load the frozen parts that model.json describes.

    Args:
        config: model.json.
        family: family of the predictor.
        tokenizers: directories named in data.json.
        needs_video, needs_text: False where features take the place of clips, or captions.

    Raises:
        ConfigError: a directory isn't named or doesn't exist.
        CheckpointError: a directory can't be loaded.
    """
    whole = Path(config.init_from_diffusers) if config.init_from_diffusers else None
    parts = FrozenParts()
    if needs_video:
        directory = whole / "vae" if whole is not None else None
        if config.ae is None and directory is None:
            raise ConfigError(f"{config.file}: 'ae' is missing: what makes latents of clips (pixel: nothing does)")
        parts.ae = open_autoencoder(
            config.ae or AeConfig(), config.file, default_class=family.defaults.ae, directory=directory
        )
        described = config.first_frame_encoder
        if described is not None:
            parts.image_encoder = open_image_encoder(described, config.file, config.trust_remote_code)
    if needs_text:
        parts.captions = open_captions(config, family, tokenizers)
    return parts


def open_image_encoder(described: ImageEncoderConfig, file: str, trust_remote_code: bool = False) -> FrozenImageEncoder:
    """Load a vision encoder, with the image processor in its directory or beside it.

    Args:
        described: `image_encoder` of model.json.
        file: its name, for messages.
        trust_remote_code: whether code in these directories may run.

    Raises:
        ConfigError: the directory holds no encoder, or there is no image processor.
    """
    import transformers

    if not described.from_pretrained or not (Path(described.from_pretrained) / "config.json").is_file():
        raise ConfigError(
            f"{file}: 'image_encoder.from_pretrained' is {show(described.from_pretrained)}; expected the directory of "
            f"a vision encoder, with config.json{hub_advice(described.from_pretrained or '')}"
        )
    directory = Path(described.from_pretrained)
    stated = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    names = stated.get("architectures") or []
    found: Any = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), transformers.AutoModel)
    remote: Any = {"trust_remote_code": trust_remote_code}
    model = found.from_pretrained(str(directory), dtype=to_torch_dtype(described.dtype), **remote)
    place = image_processor_directory(directory)
    if place is None:
        raise ConfigError(
            f"{file}: no preprocessor_config.json for 'image_encoder' in '{directory}', nor in a folder "
            f"{' or '.join(_PROCESSORS)} beside it"
        )
    model.requires_grad_(False)
    return FrozenImageEncoder(model.eval(), transformers.AutoImageProcessor.from_pretrained(str(place), **remote))


def image_processor_directory(encoder: Path) -> Path | None:
    """Return the directory of an encoder's image processor: the encoder's own, or one beside it; None: neither."""
    places = (encoder, *(encoder.parent / name for name in _PROCESSORS))
    return next((place for place in places if (place / "preprocessor_config.json").is_file()), None)
