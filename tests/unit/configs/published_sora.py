"""model.json, data.json and launch flags as published scripts of Wan 2.1, Wan 2.2 and HunyuanVideo 1.5 hold them."""

from __future__ import annotations

from typing import Any

#: hidden width, feed-forward width, blocks, heads
_WAN = {"1.3b": (1536, 8960, 30, 12), "14b": (5120, 13824, 40, 40), "5b": (3072, 14336, 30, 24)}

#: name → size, model_type, channels in and out, task, boundaries of an expert
WAN: dict[str, tuple[str, str, int, int, str, tuple[float, float] | None]] = {
    "wan2.1/1.3b/t2v": ("1.3b", "t2v", 16, 16, "t2v", None),
    "wan2.1/1.3b/i2v": ("1.3b", "i2v", 36, 16, "i2v", None),
    "wan2.1/14b/t2v": ("14b", "t2v", 16, 16, "t2v", None),
    "wan2.1/14b/i2v": ("14b", "i2v", 36, 16, "i2v", None),
    "wan2.2/5B/t2v": ("5b", "ti2v", 48, 48, "t2v", None),
    "wan2.2/5B/ti2v": ("5b", "ti2v", 48, 48, "i2v", None),
    "wan2.2/A14B/t2v/high": ("14b", "wan2.2-t2v", 16, 16, "t2v", (0.0, 0.417)),
    "wan2.2/A14B/t2v/low": ("14b", "wan2.2-t2v", 16, 16, "t2v", (0.417, 1.0)),
    "wan2.2/A14B/i2v/high": ("14b", "wan2.2-i2v", 36, 16, "i2v", (0.0, 0.358)),
    "wan2.2/A14B/i2v/low": ("14b", "wan2.2-i2v", 36, 16, "i2v", (0.358, 1)),
}


def wan_model(name: str, folder: str = "./weights") -> dict[str, Any]:
    """The pretrain_model.json of a Wan; its directories lie in `folder`."""
    size, model_type, channels, out, task, boundaries = WAN[name]
    hidden, ffn, layers, heads = _WAN[size]
    features = name.startswith("wan2.1")
    content: dict[str, Any] = {
        "allow_internal_format": False,
        "load_video_features": features,
        "load_text_features": features,
        "task": task,
        "ae": {
            "model_id": "wan_video_vae",
            "from_pretrained": f"{folder}/vae/",
            "dtype": "bf16",
            "norm_latents": True,
            "norm_mode": "channel_specified_shift_scale",
            "enable_tiling": False,
            "tiling_param": {
                "tile_size": [34, 34],
                "tile_stride": [18, 16],
                "tile_sample_min_height": 256,
                "tile_sample_min_width": 256,
                "tile_sample_stride_height": 192,
                "tile_sample_stride_width": 192,
            },
            "do_sample": False,
            "freeze": True,
        },
        "text_encoder": {
            "hub_backend": "hf",
            "model_id": "UMT5",
            "dtype": "bf16",
            "from_pretrained": f"{folder}/text_encoder/",
            "dropout_rate": 0.0,
        },
        "predictor": {
            "model_id": "wandit",
            "dtype": "bf16",
            "model_type": model_type,
            "patch_size": [1, 2, 2],
            "text_len": 512,
            "in_dim": channels,
            "hidden_size": hidden,
            "ffn_dim": ffn,
            "freq_dim": 256,
            "text_dim": 4096,
            "img_dim": 1280,
            "out_dim": out,
            "num_heads": heads,
            "num_layers": layers,
            "pipeline_num_layers": [layers],
            "qk_norm": True,
            "qk_norm_type": "rmsnorm",
            "cross_attn_norm": True,
            "eps": 1e-6,
            "max_seq_len": 1024,
            "clip_token_len": 257,
            "fp32_calculate": True,
            "attention_async_offload": False,
            "use_fused_rmsnorm": True,
            "FPDT": False,
            "FPDT_chunk_number": 4,
            "FPDT_with_offload": False,
        },
        "diffusion": {
            "model_id": "wan_flow_match_scheduler",
            "num_train_timesteps": 1000,
            "shift": 5,
            "sigma_min": 0.0,
            "extra_one_step": True,
        },
        "patch": {"clip_grad_async": True},
    }
    if model_type == "i2v":
        processor = {"processor_id": "wan_i2v_processor", "image_encoder": f"{folder}/image_encoder"}
        content["ae"]["i2v_processor"] = {**processor, "i2v_vae_encode_tiling": False}
        content["image_encoder"] = {"from_pretrained": f"{folder}/image_encoder", "dtype": "bf16"}
    if model_type == "ti2v":
        content["predictor"]["seperated_timestep"] = True
    if boundaries is not None:
        content["diffusion"] |= dict(zip(("min_timestep_boundary", "max_timestep_boundary"), boundaries, strict=True))
    return content


def hunyuan_model(task: str, folder: str = "./weights") -> dict[str, Any]:
    """The model_hunyuanvideo_15.json of a task."""
    of_text = {"hub_backend": "hf", "dtype": "fp16", "low_cpu_mem_usage": True}
    return {
        "task": task,
        "load_video_features": False,
        "load_text_features": False,
        "encoder_offload_interval": 8,
        "ae": {
            "model_id": "hunyuanvideo_15_vae",
            "from_pretrained": f"{folder}/vae",
            "dtype": "float16",
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 32,
            "block_out_channels": [128, 256, 512, 1024, 1024],
            "layers_per_block": 2,
            "ffactor_spatial": 16,
            "ffactor_temporal": 4,
            "sample_size": 256,
            "sample_tsize": 64,
            "scaling_factor": 1.03682,
            "shift_factor": None,
            "downsample_match_channel": True,
            "upsample_match_channel": True,
            "enable_tiling": True,
            "do_sample": True,
            "i2v_processor": {
                "processor_id": "hunyuanvideo_15_i2v_processor",
                "processor_path": f"{folder}/image_encoder",
            },
        },
        "text_encoder": [
            {
                **of_text,
                "model_id": "Hunyuan15MLLmModel",
                "from_pretrained": f"{folder}/text_encoder",
                "template_id": "li-dit-encode-video-json",
                "template_file_path": "examples/hunyuanvideo_1.5/template.json",
                "hidden_state_skip_layer": 2,
                "output_key": "hidden_states",
                "use_attention_mask": True,
            },
            {
                **of_text,
                "model_id": "Hunyuan15GlyphModel",
                "from_pretrained": f"{folder}/text_encoder_2",
                "byT5_ckpt_path": "Glyph-SDXL-v2/checkpoints/byt5_model.pt",
                "byt5_max_length": 256,
                "color_ann_path": "Glyph-SDXL-v2/assets/color_idx.json",
                "font_ann_path": "Glyph-SDXL-v2/assets/multilingual_10-lang_idx.json",
            },
        ],
        "predictor": {
            "model_id": "hunyuanvideo15dit",
            "dtype": "bf16",
            "task_type": task,
            "patch_size": [1, 1, 1],
            "in_channels": 32,
            "out_channels": 32,
            "hidden_size": 2048,
            "num_heads": 16,
            "head_dim": 128,
            "mm_double_blocks_depth": 54,
            "mm_single_blocks_depth": 0,
            "mlp_width_ratio": 4,
            "mlp_act_type": "gelu_tanh",
            "qkv_bias": True,
            "qk_norm": True,
            "qk_norm_type": "rms",
            "rope_dim_list": [16, 56, 56],
            "rope_theta": 256,
            "guidance_embed": False,
            "use_meanflow": False,
            "text_states_dim": 3584,
            "text_states_dim_2": None,
            "text_pool_type": None,
            "text_projection": "single_refiner",
            "use_attention_mask": True,
            "use_cond_type_embedding": True,
            "vision_projection": "linear",
            "vision_states_dim": 1152,
            "glyph_byT5_v2": True,
            "concat_condition": True,
            "is_reshape_temporal_channels": False,
            "attn_mode": "flash2",
            "attn_param": {"win_size": [[3, 3, 3]], "win_type": "fixed", "win_ratio": 10, "tile_size": [6, 8, 8]},
        },
        "diffusion": {
            "model_id": "hunyuanvideo_15_diffusion",
            "num_train_timesteps": 1000,
            "train_timestep_shift": 3.0,
            "shift": 7.0,
            "snr": "lognorm",
            "solver": "euler",
            "reverse": True,
            "sp_size": 1,
        },
    }


_RESIZE = {"align_corners": False, "antialias": False, "interpolation_mode": "bilinear", "mode": "resize"}
_STEPS = [
    {"trans_type": "ResizeVideo", "param": {"transform_size": "auto", **_RESIZE}},
    {"trans_type": "ToTensorVideo"},
    {"trans_type": "norm_fun", "param": {"mean": 0.5, "std": 0.5}},
]
_LOADER = {
    "dataloader_mode": "sampler",
    "sampler_type": "SequentialSampler",
    "shuffle": False,
    "drop_last": True,
    "pin_memory": True,
    "group_data": True,
    "group_frame": False,
    "group_resolution": False,
    "initial_global_step_for_sampler": 0,
}


def clips_data(tokenizers: int = 1, folder: str = "./weights") -> dict[str, Any]:
    """data.json of captioned clips, as for Wan 2.2 and HunyuanVideo 1.5 and for extracting features of Wan 2.1's."""
    of_one = {"hub_backend": "hf", "autotokenizer_name": "AutoTokenizer", "model_max_length": 512}
    return {
        "dataset_param": {
            "dataset_type": "t2v",
            "basic_parameters": {
                "data_path": "./examples/wan2.2/data.txt",
                "data_folder": "",
                "data_storage_mode": "combine",
            },
            "preprocess_parameters": {
                "video_reader_type": "DecordVideo",
                "image_reader_type": "Image",
                "video_processor_type": "OpensoraplanVideoProcessor",
                "image_processer_type": "image2image",
                "num_frames": 81,
                "min_num_frames": 1,
                "frame_interval": 1,
                "train_fps": 24,
                "speed_factor": 1.0,
                "drop_short_ratio": 0.0,
                "auto_interval": False,
                "zero_start": True,
                "max_height": 480,
                "max_width": 832,
                "max_hxw": 399360,
                "force_resolution": False,
                "hw_stride": 8,
                "hw_aspect_thr": 2.0,
                "cfg": 0.0,
                "vae_stride": [4, 8, 8],
                "vae_patch_size": [1, 2, 2],
                "train_pipeline": {"video": _STEPS, "image": _STEPS},
            },
            "use_text_processer": True,
            "enable_text_preprocessing": True,
            "text_preprocess_methods": [{"method": "basic_clean"}, {"method": "whitespace_clean"}],
            "support_chinese": True,
            "tokenizer_config": [
                {**of_one, "from_pretrained": f"{folder}/tokenizer{'' if n == 0 else f'_{n + 1}'}"}
                for n in range(tokenizers)
            ],
        },
        "dataloader_param": dict(_LOADER),
    }


def feature_data() -> dict[str, Any]:
    """feature_data.json, as for Wan 2.1."""
    return {
        "dataset_param": {
            "dataset_type": "feature",
            "basic_parameters": {"data_path": "./sora_features/data.jsonl", "data_folder": "./sora_features/"},
        },
        "dataloader_param": {**_LOADER, "sampler_type": "BaseRandomBatchSampler", "shuffle": True},
    }


#: of every published launch script of pretrain_sora.py
FLAGS = """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1
    --context-parallel-algo ulysses_cp_algo --micro-batch-size 1 --global-batch-size 8 --num-workers 8 --lr 1e-5
    --min-lr 1e-5 --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-8 --lr-decay-style constant --weight-decay 1e-2
    --lr-warmup-init 0 --lr-warmup-iters 0 --clip-grad 0.0 --train-iters 5000 --no-gradient-accumulation-fusion
    --no-load-optim --no-load-rng --no-save-optim --no-save-rng --bf16 --distributed-timeout-minutes 20
    --optimizer-selection fused_torch_adamw --log-interval 1 --save-interval 10000 --eval-interval 10000
    --eval-iters 10 --distributed-backend nccl"""
#: of those that go through Megatron-core
MEGATRON_FLAGS = """--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --vocab-size 1
    --seq-length 1024 --recompute-granularity full --recompute-method block --recompute-num-layers 30
    --attention-mask-type general --tokenizer-type NullTokenizer --use-cpu-initialization --ckpt-format torch
    --normalization RMSNorm --use-fused-rmsnorm --swiglu --use-flash-attn"""
#: of those with FSDP2
FSDP2_FLAGS = """--use-torch-fsdp2 --ckpt-format torch_dcp --untie-embeddings-and-output-weights --downcast-to-bf16
    --init-model-with-meta-device"""
LAYERZERO_FLAGS = "--layerzero --layerzero-config layerzero.yaml --ckpt-format torch_dist"
