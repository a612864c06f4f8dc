"""Why keys of published model.json files have no effect for a generation model, or are refused."""

from __future__ import annotations

import re

from mindspeed_mm.configs.published import NoEffect, Refused, is_given, is_on

#: published keys that describe the predictor's structure
STRUCTURE = re.compile(
    r"predictor\.(model_type|task_type|patch_size|text_len|in_dim|in_channels|hidden_size|ffn_dim|freq_dim|text_dim"
    r"|img_dim|out_dim|out_channels|num_heads|num_layers|head_dim|qk_norm|qk_norm_type|qkv_bias|cross_attn_norm|eps"
    r"|max_seq_len|clip_token_len|mm_double_blocks_depth|mm_single_blocks_depth|mlp_width_ratio|rope_dim_list|rope_theta"
    r"|guidance_embed|text_states_dim|text_states_dim_2|vision_states_dim|glyph_byT5_v2|text_projection"
    r"|text_pool_type|vision_projection|concat_condition|use_meanflow|use_cond_type_embedding|use_attention_mask"
    r"|seperated_timestep|is_reshape_temporal_channels|mlp_act_type|pipeline_num_layers|attn_mode|attn_param(\..*)?)"
)

#: published keys that describe the autoencoder's structure
AE_STRUCTURE = re.compile(
    r"ae\.(in_channels|out_channels|latent_channels|block_out_channels|layers_per_block|ffactor_spatial|ffactor_temporal"
    r"|downsample_match_channel|upsample_match_channel)"
)

REFUSED_SORA_KEYS = (
    Refused(
        "predictor.model_type",
        lambda value: value == "flf2v",
        "videos between a first and a last frame are not there yet; expected t2v, i2v, ti2v, wan2.2-t2v or wan2.2-i2v",
    ),
    Refused(
        "diffusion.reverse",
        lambda value: value is not None and not is_on(value),
        "timesteps count towards noise here; write true, or remove it",
    ),
    Refused("dpo", is_given, "preference training is not there yet; remove it"),
    Refused(
        "ae.freeze",
        lambda value: value is not None and not is_on(value),
        "the autoencoder is not trained; write true, or remove it",
    ),
    Refused("predictor.FPDT", is_on, "chunked sequences in host memory are not there yet; write false"),
    Refused("use_dynamic_dpcp", is_on, "context parallelism is not there yet; write false"),
    Refused(
        "patch.adaptive_clip_grad_norm", is_on, "adaptive clipping is not there yet; write false and use --clip-grad"
    ),
    Refused(
        "patch.layerwise_disaggregated_training", is_on, "layer-wise disaggregated training is not there; write false"
    ),
    Refused(
        "text_encoder.hidden_state_skip_layer",
        lambda value: value is not None and value != 2,
        "states are taken where the model's diffusers pipeline takes them, two layers before the last; write 2, or "
        "remove it",
    ),
    Refused(
        "text_encoder.output_key",
        lambda value: value not in (None, "hidden_states", "last_hidden_state", "pooler_output"),
        "states are those that the model's diffusers pipeline takes; remove it",
    ),
    Refused("text_encoder.load_in_8bit", is_on, "text encoders compute in text_encoder.dtype; write false"),
)

IDLE_SORA_KEYS = (
    NoEffect(r"predictor\.(FPDT.*|attention_async_offload)", "memory is saved by fsdp2.yaml's recompute_modules"),
    NoEffect(r"predictor\.(use_fused_rmsnorm|fp32_calculate)", "the kernels are diffusers' own"),
    NoEffect(r"patch\.muon_optimizer", "--optimizer muon alone chooses it"),
    NoEffect(r"patch\..*|allow_internal_format", "nothing is patched"),
    NoEffect(r"text_encoder\.(hub_backend|low_cpu_mem_usage|load_in_8bit)", "files are read from the directory"),
    NoEffect(r"text_encoder\..*", "captions are encoded as the model's diffusers pipeline does it"),
    NoEffect(r"ae\.i2v_processor\..*", "the first frame is made a condition as the model's diffusers pipeline does it"),
    NoEffect(r"ae\.freeze", "the autoencoder is never trained"),
    NoEffect(
        r"ae\.tiling_param\.(tile_size|tile_stride)",
        "tiles are measured in pixels: write tile_sample_min_height, tile_sample_stride_height and so on",
    ),
    NoEffect(r"ae\..*", "structure comes from the directory's config.json, which is authoritative"),
    NoEffect(r"diffusion\..*", "it belongs to sampling (inference_sora.py)"),
    NoEffect(r".*", "it belongs to another entry script"),
)
