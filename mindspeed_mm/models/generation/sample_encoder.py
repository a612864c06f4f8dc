"""Encoding of clips and captions by the frozen parts, for training and for feature extraction alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mindspeed_mm import accelerator
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.models.generation.parts import FrozenParts, open_parts
from mindspeed_mm.models.generation.predictor.family import PredictorFamily
from mindspeed_mm.utils.device import host_value, move_to_device
from mindspeed_mm.utils.errors import ConfigError

FIRST_FRAMES = "first_frames"
"""Field of a micro-batch of clips: their first frames, [batch, 3, height, width], in host memory."""


class SampleEncoder:
    """The frozen parts of a model, loaded when the first sample needs them.

    They are not part of the model's state: neither sharded nor saved.

    Args:
        config: model.json.
        family: family of the predictor.
        tokenizers: directories named in data.json, in the order of the text encoders.
        needs_video, needs_text: False where features take the place of clips, or of captions.
        stays: whether they stay on the device; else they stay on the host until `load`.
    """

    def __init__(
        self,
        config: SoRAModelConfig,
        family: PredictorFamily,
        tokenizers: Sequence[str | None] = (),
        *,
        needs_video: bool = True,
        needs_text: bool = True,
        stays: bool = True,
    ) -> None:
        self._config, self._family, self._tokenizers = config, family, list(tokenizers)
        self._needs_video, self._needs_text, self._stays = needs_video, needs_text, stays
        self._parts: FrozenParts | None = None
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def parts(self) -> FrozenParts:
        """The frozen parts."""
        if self._parts is None:
            with torch.device("cpu"):
                self._parts = open_parts(
                    self._config,
                    self._family,
                    self._tokenizers,
                    needs_video=self._needs_video,
                    needs_text=self._needs_text,
                )
            if self._stays:
                self._parts.to(accelerator.current().device())
            else:
                self._on_host = [
                    (tensor, tensor.data)
                    for module in self._parts.modules()
                    for tensor in (*module.parameters(), *module.buffers())
                ]
        return self._parts

    def load(self) -> None:
        """Copy offloaded parts to the device; if the device is the host, nothing is copied."""
        assert self.parts is not None
        current = accelerator.current()
        if not current.is_host:
            for tensor, on_host in self._on_host:
                tensor.data = on_host.to(current.device(), non_blocking=True, copy=True)

    def offload(self) -> None:
        """Free the device memory of parts that don't stay there; their values have been on the host all along."""
        for tensor, on_host in self._on_host:
            tensor.data = on_host

    @torch.no_grad()
    def encode(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Encode a micro-batch with the frozen parts; features in it are taken as they are.

        Args:
            batch: `video` [batch, 3, frames, height, width] float32 or `latents` (with `latents_std`, where they are
                drawn) and `cond.*`; `captions`, a list of texts, or `text.*`.

        Returns:
            `latents` and `latents_std` (None: they are not drawn) [batch, channels, …] float32, `text` and
            `conditions`, name → [batch, …].

        Raises:
            ConfigError: the batch has raw samples where model.json states that features come with the data.
        """
        text = {k.removeprefix("text."): v for k, v in batch.items() if k.startswith("text.")}
        clips = self.encode_clips(batch)
        return {**clips, "text": text or self.encode_captions(batch["captions"])}

    @torch.no_grad()
    def encode_clips(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return `latents`, `latents_std` and `conditions` of `encode`.

        Raises:
            ConfigError: there is no autoencoder, as model.json states that latents come with the data.
        """
        if "latents" in batch:
            conditions = {k.removeprefix("cond."): v for k, v in batch.items() if k.startswith("cond.")}
            return {"latents": batch["latents"], "latents_std": batch.get("latents_std"), "conditions": conditions}
        ae = self.parts.ae
        if ae is None:
            raise ConfigError(
                f"{self._config.file}: 'load_video_features' is true, but the data are clips; write false, or "
                "dataset_type: feature in data.json"
            )
        if self.parts.image_encoder is not None:
            self.parts.image_encoder.expect(host_value(batch.get(FIRST_FRAMES)))
        video = move_to_device(batch["video"], accelerator.current().device())
        encoded = ae.encode(video)
        conditions = self._family.conditions(self.parts, video, encoded.mean)
        return {"latents": encoded.mean, "latents_std": encoded.std, "conditions": conditions}

    @torch.no_grad()
    def encode_captions(self, captions: Sequence[str]) -> dict[str, torch.Tensor]:
        """Encode captions into text states, name → [captions, …].

        Raises:
            ConfigError: there are no text encoders, as model.json states that text states come with the data.
        """
        encoder = self.parts.captions
        if encoder is None:
            raise ConfigError(
                f"{self._config.file}: 'load_text_features' is true, but the data are captions; write false, or "
                "dataset_type: feature in data.json"
            )
        return encoder.encode(captions, accelerator.current().device())
