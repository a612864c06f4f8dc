"""Wan 2.1 and 2.2: text to video, image to video, and the 5B model with a timestep for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.generation.predictor.family import FamilyDefaults, PredictorFamily, register_predictor_family
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

#: published structure keys that `translate` reads
_READ = {
    "model_type",
    "task_type",
    "patch_size",
    "num_heads",
    "hidden_size",
    "in_dim",
    "out_dim",
    "text_dim",
    "freq_dim",
}
_READ |= {"ffn_dim", "num_layers", "pipeline_num_layers", "cross_attn_norm", "qk_norm", "eps", "img_dim", "max_seq_len"}


@register_predictor_family
class Wan(PredictorFamily):
    """diffusers' WanTransformer3DModel."""

    names = ("wan",)
    published_names = ("wandit",)
    model_class_name = "WanTransformer3DModel"
    pipelines = {"t2v": "WanPipeline", "i2v": "WanImageToVideoPipeline", "ti2v": "WanImageToVideoPipeline"}
    defaults = FamilyDefaults(
        shift=5.0,
        sampling="uniform",
        weighting="gaussian",
        ae="AutoencoderKLWan",
        strides=(4, 8),
        text_length=512,
    )
    # examples/wan2.1/fsdp2_config.yaml, examples/wan2.2/5B/fsdp2_config.yaml and A14B/fsdp2_config.yaml
    older_paths = {"head": "proj_out"}
    # as published launches name layers, and as Wan's authors and the trainers of their model do
    older_layers = {
        "q": "to_q",
        "k": "to_k",
        "v": "to_v",
        "o": "to_out.0",
        "k_img": "add_k_proj",
        "v_img": "add_v_proj",
        "proj_q": "to_q",
        "proj_k": "to_k",
        "proj_v": "to_v",
        "proj_out": "to_out.0",
        "ffn.0": "ffn.net.0.proj",
        "ffn.2": "ffn.net.2",
    }

    @classmethod
    def translate(cls, structure: Mapping[str, Any], task: str, file: str) -> dict[str, Any]:
        """See the base class."""
        has_image = structure.get("model_type") in ("i2v", "flf2v")
        heads, hidden = int(structure.get("num_heads", 12)), int(structure.get("hidden_size", 1536))
        if hidden % heads:
            raise ConfigError(
                f"{file}: 'predictor.hidden_size' {hidden} is no multiple of 'predictor.num_heads' {heads}"
            )
        if unread := sorted(structure.keys() - _READ):
            keys = ", ".join(f"predictor.{key}" for key in unread)
            notice(
                f"{file}: no effect here: {keys}: {cls.model_class_name} fixes it (the longest caption is "
                "text_encoder.max_length)"
            )
        # published files write the latent's channels as in_dim where the condition's are counted as well
        channels = int(structure.get("in_dim", 16))
        return {
            "patch_size": tuple(structure.get("patch_size", (1, 2, 2))),
            "num_attention_heads": heads,
            "attention_head_dim": hidden // heads,
            "in_channels": channels,
            "out_channels": int(structure.get("out_dim", 16)),
            "text_dim": int(structure.get("text_dim", 4096)),
            "freq_dim": int(structure.get("freq_dim", 256)),
            "ffn_dim": int(structure.get("ffn_dim", 8960)),
            "num_layers": _layers(structure),
            "cross_attn_norm": bool(structure.get("cross_attn_norm", True)),
            "qk_norm": "rms_norm_across_heads" if structure.get("qk_norm", True) else None,
            "eps": float(structure.get("eps", 1e-6)),
            "image_dim": int(structure.get("img_dim", 1280)) if has_image else None,
            "added_kv_proj_dim": hidden if has_image else None,
            "rope_max_seq_len": int(structure.get("max_seq_len", 1024)),
        }

    @property
    def needs_image_encoder(self) -> bool:
        """See the base class."""
        return self.task == "i2v" and self.config.get("image_dim") is not None

    @property
    def latent_channels(self) -> int:
        """See the base class."""
        return int(self.config.get("out_channels") or self.config["in_channels"])

    def text_states(
        self, pipeline: Any, captions: Sequence[str], device: torch.device, max_length: int | None
    ) -> dict[str, torch.Tensor]:
        """See the base class."""
        states, _ = pipeline.encode_prompt(
            list(captions),
            do_classifier_free_guidance=False,
            max_sequence_length=max_length or self.defaults.text_length,
            device=device,
        )
        return {"encoder_hidden_states": states}

    def conditions(self, parts: Any, video: torch.Tensor, latents: torch.Tensor) -> dict[str, torch.Tensor]:
        """See the base class."""
        if self.task == "t2v":
            return {}
        first = video[:, :, :1]
        if self.task == "ti2v":
            known = torch.zeros_like(latents[:, :1])
            known[:, :, :1] = 1
            alone = parts.ae.encode(first).mean
            return {"known_latents": alone.expand_as(latents).contiguous(), "known": known}
        shown = torch.cat([first, torch.zeros_like(video[:, :, 1:])], 2)
        conditions = {"condition": torch.cat([self._shown_frames(latents), parts.ae.encode(shown).mean], 1)}
        if self.config.get("image_dim") is not None:
            conditions["encoder_hidden_states_image"] = parts.image_encoder.hidden_states(first[:, :, 0])
        return conditions

    def _shown_frames(self, latents: torch.Tensor) -> torch.Tensor:
        """For each latent frame and each of the frames that it stands for, whether it is shown: [batch, stride, …].

        The first latent frame stands for the first frame alone, which counts for all its channels.
        """
        stride = int(self.config["in_channels"]) - 2 * self.latent_channels
        mask = latents.new_zeros(len(latents), stride, *latents.shape[2:])
        mask[:, :, 0] = 1
        return mask

    def predict(
        self,
        model: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        text: Mapping[str, torch.Tensor],
        conditions: Mapping[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        """See the base class."""
        known = conditions.get("known")
        if known is not None:
            # a timestep for each token: those of the known frame are without noise
            patch = self.spatial_patch
            of_token = (1 - known[:, 0, :, ::patch, ::patch]).flatten(1) * timesteps[:, None]
            timesteps = of_token.to(timesteps.dtype)
        if "condition" in conditions:
            noisy = torch.cat([noisy, conditions["condition"].to(noisy.dtype)], 1)
        picture = conditions.get("encoder_hidden_states_image")
        return model(
            hidden_states=noisy,
            timestep=timesteps,
            encoder_hidden_states=text["encoder_hidden_states"].to(noisy.dtype),
            encoder_hidden_states_image=None if picture is None else picture.to(noisy.dtype),
            return_dict=False,
        )[0]


def _layers(structure: Mapping[str, Any]) -> int:
    if "num_layers" in structure:
        return int(structure["num_layers"])
    stages = structure.get("pipeline_num_layers")
    if stages is None:
        return 30
    return sum(sum(stage) if isinstance(stage, list) else stage for stage in stages)
