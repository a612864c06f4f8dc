"""HunyuanVideo 1.5: text to video, image to video, with published structure keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_mm.models.generation.predictor.family import FamilyDefaults, PredictorFamily, register_predictor_family
from mindspeed_mm.utils.errors import ConfigError, did_you_mean
from mindspeed_mm.utils.log import notice

#: tokens of a picture in the pipelines' conditions: SigLIP's 27 × 27 patches
PICTURE_TOKENS = 729

#: published structure keys with one value that diffusers' class has: key → accepted values
_FIXED: dict[str, tuple[Any, ...]] = {
    "mm_single_blocks_depth": (0, None),
    "guidance_embed": (False, None),
    "use_meanflow": (False, None),
    "is_reshape_temporal_channels": (False, None),
    "qkv_bias": (True, None),
    "qk_norm": (True, None),
    "qk_norm_type": ("rms", "rms_norm", None),
    "mlp_act_type": ("gelu_tanh", None),
    "glyph_byT5_v2": (True, None),
    "text_projection": ("single_refiner", None),
    "text_pool_type": (None,),
    "text_states_dim_2": (None,),
    "concat_condition": (True, None),
    "use_cond_type_embedding": (True, None),
    "use_attention_mask": (True, None),
}
#: published structure keys that are translated, or don't describe the structure
_KNOWN = (
    *_FIXED,
    *("hidden_size", "num_heads", "head_dim", "mm_double_blocks_depth", "mlp_width_ratio", "patch_size", "in_channels"),
    *("out_channels", "rope_dim_list", "rope_theta", "text_states_dim", "vision_states_dim", "vision_projection"),
    *("task_type", "model_type", "attn_mode", "attn_param"),
)


@register_predictor_family
class HunyuanVideo15(PredictorFamily):
    """diffusers' HunyuanVideo15Transformer3DModel.

    Its input is the noisy latent, the first frame's latent and a mask of frames that are shown; its text a language
    model's states and a glyph encoder's (of the text in quotation marks), each with a mask; its picture SigLIP's
    states. Training draws logit-normal timesteps and shifts them by 3, as the published training configuration does;
    sampling is shifted more.
    """

    names = ("hunyuanvideo15",)
    published_names = ("hunyuanvideo15dit",)
    model_class_name = "HunyuanVideo15Transformer3DModel"
    pipelines = {"t2v": "HunyuanVideo15Pipeline", "i2v": "HunyuanVideo15ImageToVideoPipeline"}
    defaults = FamilyDefaults(shift=3.0, ae="AutoencoderKLHunyuanVideo15", strides=(4, 16), text_length=1000)
    # examples/hunyuanvideo_1.5/fsdp2_config.yaml
    older_paths = {"double_blocks": "transformer_blocks"}

    def __init__(self, task: str, config: Mapping[str, Any]) -> None:
        """See the base class.

        Raises:
            ConfigError: the model is trained with mean flows, which take a second timestep.
        """
        super().__init__(task, config)
        if config.get("use_meanflow"):
            raise ConfigError(
                "model.json: 'predictor': use_meanflow is true; training of mean flows is not supported: use a "
                "transformer whose config.json has false"
            )

    @classmethod
    def translate(cls, structure: Mapping[str, Any], task: str, file: str) -> dict[str, Any]:
        """See the base class."""
        _check_published(structure, task, file)
        hidden = int(structure.get("hidden_size", 2048))
        heads = int(structure.get("num_heads", 16))
        width = int(structure.get("head_dim") or hidden // heads)
        if heads * width != hidden:
            raise ConfigError(
                f"{file}: 'predictor.hidden_size' is {hidden}; expected num_heads × head_dim, {heads} × {width}"
            )
        patch = structure.get("patch_size", (1, 1, 1))
        if len(patch) != 3 or patch[1] != patch[2]:
            raise ConfigError(
                f"{file}: 'predictor.patch_size' is {list(patch)}; expected [frames, rows, columns] with as many rows "
                "as columns"
            )
        channels = int(structure.get("in_channels", 32))
        return {
            # the noisy latent, the first frame's, and the mask
            "in_channels": 2 * channels + 1,
            "out_channels": int(structure.get("out_channels", channels)),
            "num_attention_heads": heads,
            "attention_head_dim": width,
            "num_layers": int(structure.get("mm_double_blocks_depth", 54)),
            "mlp_ratio": float(structure.get("mlp_width_ratio", 4.0)),
            "patch_size": int(patch[2]),
            "patch_size_t": int(patch[0]),
            "text_embed_dim": int(structure.get("text_states_dim", 3584)),
            "image_embed_dim": int(structure.get("vision_states_dim", 1152)),
            "rope_theta": float(structure.get("rope_theta", 256.0)),
            "rope_axes_dim": tuple(structure.get("rope_dim_list", (16, 56, 56))),
            "task_type": task,
        }

    @property
    def latent_channels(self) -> int:
        """See the base class."""
        return int(self.config["out_channels"])

    @property
    def temporal_patch(self) -> int:
        """See the base class."""
        return int(self.config.get("patch_size_t") or 1)

    @property
    def needs_image_encoder(self) -> bool:
        """See the base class."""
        return self.task == "i2v"

    def text_states(
        self, pipeline: Any, captions: Sequence[str], device: torch.device, max_length: int | None
    ) -> dict[str, torch.Tensor]:
        """See the base class."""
        if max_length is not None:
            pipeline.tokenizer_max_length = max_length
        states, mask, glyphs, glyph_mask = pipeline.encode_prompt(
            list(captions), device=device, batch_size=len(captions)
        )
        return {
            "encoder_hidden_states": states,
            "encoder_attention_mask": mask,
            "encoder_hidden_states_2": glyphs,
            "encoder_attention_mask_2": glyph_mask,
        }

    def conditions(self, parts: Any, video: torch.Tensor, latents: torch.Tensor) -> dict[str, torch.Tensor]:
        """See the base class.

        Raises:
            ConfigError: there is no image encoder.
        """
        if self.task == "t2v":
            return {}
        first = video[:, :, :1]
        shown = torch.cat([parts.ae.encode(first).mean, torch.zeros_like(latents[:, :, 1:])], 2)
        mask = torch.zeros_like(latents[:, :1])
        mask[:, :, 0] = 1
        return {
            "condition": torch.cat([shown, mask], 1),
            "image_embeds": parts.image_encoder.last_hidden_state(first[:, :, 0]),
        }

    def predict(
        self,
        model: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        text: Mapping[str, torch.Tensor],
        conditions: Mapping[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        """See the base class; without an image, its latent, mask and states are zeros."""
        condition, picture = conditions.get("condition"), conditions.get("image_embeds")
        if condition is None:
            condition = torch.zeros_like(torch.cat([noisy, noisy[:, :1]], 1))
        if picture is None:
            picture = noisy.new_zeros(len(noisy), PICTURE_TOKENS, int(self.config["image_embed_dim"]))
        return model(
            hidden_states=torch.cat([noisy, condition.to(noisy.dtype)], 1),
            timestep=timesteps.to(noisy.dtype),
            encoder_hidden_states=text["encoder_hidden_states"].to(noisy.dtype),
            encoder_attention_mask=text["encoder_attention_mask"],
            encoder_hidden_states_2=text["encoder_hidden_states_2"].to(noisy.dtype),
            encoder_attention_mask_2=text["encoder_attention_mask_2"],
            image_embeds=picture.to(noisy.dtype),
            return_dict=False,
        )[0]


def _check_published(structure: Mapping[str, Any], task: str, file: str) -> None:
    """Refuse keys that diffusers' class doesn't support, and report keys without an effect."""
    for key, value in structure.items():
        name = key.partition(".")[0]
        if name not in _KNOWN:
            raise ConfigError(
                f"{file}: 'predictor.{key}' is no structure key of hunyuanvideo15dit{did_you_mean(name, _KNOWN)}"
            )
        if name in _FIXED and value not in _FIXED[name]:
            expected = " or ".join(repr(v) for v in _FIXED[name] if v is not None) or "null"
            raise ConfigError(
                f"{file}: 'predictor.{key}' is {value!r}; diffusers' HunyuanVideo15Transformer3DModel has {expected}"
            )
    if structure.get("attn_mode") == "flex-block-attn":
        raise ConfigError(
            f"{file}: 'predictor.attn_mode' is 'flex-block-attn'; sparse attention is not supported: write 'flash2', "
            "which attends to everything"
        )
    if task == "i2v" and structure.get("vision_projection", "linear") != "linear":
        raise ConfigError(
            f"{file}: 'predictor.vision_projection' is {structure['vision_projection']!r}; expected 'linear' for i2v"
        )
    if any(key.startswith("attn_param") for key in structure):
        notice(f"{file}: 'predictor.attn_param' has no effect: it belongs to attn_mode flex-block-attn")
