"""Families of diffusion transformers: one small class for each, and the registry."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from mindspeed_mm.utils.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class FamilyDefaults:
    """Defaults for keys that model.json's `diffusion` and `ae` leave out.

    Attributes:
        objective: flow_matching or ddpm.
        prediction_type: flow_prediction, v_prediction or epsilon.
        shift: shift of flow matching.
        dynamic_shift: whether the shift follows the number of tokens.
        shift_range: (exponent at few tokens, exponent at many, few tokens, many) of such a shift.
        sampling: density that timesteps are drawn from.
        weighting: weighting of the loss by timestep.
        beta_start, beta_end, beta_schedule: noise schedule of ddpm.
        scheduler: diffusers class that ddpm takes its betas from.
        scheduler_config: further settings of the diffusers scheduler.
        ae: diffusers class of its autoencoder.
        strides: frames and pixels for each latent of it.
        text_length: longest caption in tokens.
    """

    objective: str = "flow_matching"
    prediction_type: str = "flow_prediction"
    shift: float = 1.0
    dynamic_shift: bool = False
    shift_range: tuple[float, float, int, int] = (0.5, 1.15, 256, 4096)
    sampling: str = "logit_normal"
    weighting: str = "uniform"
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"
    scheduler: str = "DDPMScheduler"
    scheduler_config: Mapping[str, Any] = field(default_factory=dict)
    ae: str = ""
    strides: tuple[int, int] = (1, 8)
    text_length: int | None = None


class PredictorFamily(ABC):
    """How a family's transformer is built, what it is conditioned on, and how it is called.

    Latents are [batch, channels, frames, height, width] everywhere outside of `predict`; images have one frame.

    Attributes:
        names: values of `model_id` in model.json; the first is the family's name in messages.
        published_names: further values, for which the structure uses the published keys.
        model_class_name: diffusers' class.
        pipelines: task → diffusers' pipeline; the first is the default task.
        defaults: see `FamilyDefaults`.
        older_paths: module path of a published fsdp2.yaml, without `predictor.` → path in the diffusers class. What
            follows it in an entry is kept, and has to exist.
        older_layers: end of a layer's path in published LoRA launches → that in the diffusers class.
    """

    names: ClassVar[tuple[str, ...]] = ()
    published_names: ClassVar[tuple[str, ...]] = ()
    model_class_name: ClassVar[str] = ""
    pipelines: ClassVar[Mapping[str, str]] = {}
    defaults: FamilyDefaults = FamilyDefaults()
    older_paths: ClassVar[Mapping[str, str]] = {}
    older_layers: ClassVar[Mapping[str, str]] = {}

    def __init__(self, task: str, config: Mapping[str, Any]) -> None:
        """
        Args:
            task: one of `pipelines`.
            config: the transformer's diffusers configuration.
        """
        self.task = task
        self.config = config

    @classmethod
    def translate(cls, structure: Mapping[str, Any], task: str, file: str) -> dict[str, Any]:
        """Return the diffusers configuration that published structure keys describe.

        Raises:
            ConfigError: keys that this family doesn't support.
        """
        raise ConfigError(
            f"{file}: 'predictor' gives {', '.join(sorted(structure))}; {cls.names[0]} has no published structure "
            f"keys: write 'from_pretrained' (a diffusers directory) or 'config' ({cls.model_class_name}'s own keys)"
        )

    @property
    def spatial_patch(self) -> int:
        """Latent rows and columns of a token."""
        patch = self.config.get("patch_size", 1)
        return int(patch[-1]) if isinstance(patch, (list, tuple)) else int(patch)

    @property
    def temporal_patch(self) -> int:
        """Latent frames of a token."""
        patch = self.config.get("patch_size", 1)
        return int(patch[0]) if isinstance(patch, (list, tuple)) else int(self.config.get("patch_size_t") or 1)

    @property
    def needs_image_encoder(self) -> bool:
        """Whether `conditions` needs an encoder of the first frame."""
        return False

    @property
    def latent_channels(self) -> int:
        """Channels of the latent that is denoised."""
        return int(self.config["in_channels"])

    @abstractmethod
    def text_states(
        self, pipeline: Any, captions: Sequence[str], device: torch.device, max_length: int | None
    ) -> dict[str, torch.Tensor]:
        """Encode captions with the pipeline's own `encode_prompt`.

        Returns:
            tensors [captions, …] by the names of the transformer's arguments.
        """

    def padded(self, latents: torch.Tensor) -> torch.Tensor:
        """Pad latents to whole tokens: [batch, channels, frames + those added, height, width]."""
        return latents

    def conditions(self, parts: Any, video: torch.Tensor, latents: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the conditions of a sample beside its caption; none for text-to-video.

        Args:
            parts: the frozen parts: `parts.ae`, `parts.image_encoder`.
            video: [batch, 3, frames, height, width] float32 in [-1, 1].
            latents: [batch, channels, …] of the whole clip.

        Returns:
            tensors [batch, …] by name. `known_latents` [batch, channels, …] and `known` [batch, 1, …] (1 where they
            hold, and nothing is predicted) take the place of the noisy latents there.
        """
        return {}

    @abstractmethod
    def predict(
        self,
        model: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        text: Mapping[str, torch.Tensor],
        conditions: Mapping[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        """Call the transformer.

        Args:
            model: the transformer, sharded or not.
            noisy: [batch, channels, frames, height, width], in the transformer's compute dtype; other inputs are cast
                to it if the family's pipeline casts them.
            timesteps: [batch] float32 (int64 of a discrete schedule), from 0 to the number of training timesteps.
            text: text states, as `text_states` returns them.
            conditions: conditions, as `conditions` returns them.
            guidance: value of the guidance embedding, where there is one.

        Returns:
            the prediction, shaped as `noisy`.
        """


_families: dict[str, type[PredictorFamily]] = {}


def register_predictor_family(family: type[PredictorFamily]) -> type[PredictorFamily]:
    """Register a family under its names."""
    for name in (*family.names, *family.published_names):
        old = _families.get(name)
        if old is not None and old.__qualname__ != family.__qualname__:
            raise ConfigError(
                f"predictor model_id '{name}' is registered already, by {old.__module__}.{old.__qualname__}"
            )
        _families[name] = family
    return family


def families() -> dict[str, type[PredictorFamily]]:
    """Return all families by name."""
    package = importlib.import_module("mindspeed_mm.models.generation.predictor")
    for found in pkgutil.iter_modules(package.__path__):
        if found.name != "family":
            importlib.import_module(f"{package.__name__}.{found.name}")
    return dict(_families)


def find_predictor_family(model_id: str | None, class_name: str | None, file: str) -> type[PredictorFamily]:
    """Return the family of a model_id, else of a diffusers class.

    Args:
        model_id: model_id of model.json's `predictor`.
        class_name: `_class_name` of the directory's config.json.

    Raises:
        ConfigError: no family has this name, or neither name was given.
    """
    known = families()
    by_class = {family.model_class_name: family for family in known.values()}
    if model_id is not None:
        found = known.get(model_id) or by_class.get(model_id)
        if found is None:
            raise ConfigError(
                f"{file}: 'predictor.model_id' is '{model_id}'; expected one of {', '.join(sorted(known))}"
                f"{did_you_mean(model_id, known)}"
            )
        if class_name is not None and class_name != found.model_class_name:
            raise ConfigError(
                f"{file}: 'predictor.model_id' is '{model_id}' ({found.model_class_name}), but the directory of "
                f"'predictor.from_pretrained' holds a {class_name}; write its family, or leave model_id out"
            )
        return found
    if class_name is None:
        raise ConfigError(
            f"{file}: 'predictor.model_id' is missing; expected one of {', '.join(sorted(known))}, or "
            "'predictor.from_pretrained', a diffusers directory that states it"
        )
    if class_name not in by_class:
        raise ConfigError(
            f"{file}: the directory of 'predictor.from_pretrained' holds a {class_name}; expected one of "
            f"{', '.join(sorted(by_class))}"
        )
    return by_class[class_name]
