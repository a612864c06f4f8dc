"""The table of keys and flags that older releases or other trainers have: one row for each message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

SettingKind = Literal["flag", "model", "data", "fsdp2"]
#: "built in": nothing depends on it any more; "write": something else is written instead; "absent": it isn't supported
Fate = Literal["built in", "write", "absent"]


@dataclass(frozen=True)
class Older:
    """Keys with the same message.

    Attributes:
        kind: of file, or "flag".
        at: the object that contains them, as a dotted path; several separated by blanks; empty = the top.
        names: of the keys, separated by blanks; of flags with underscores and without dashes in front.
        fate: see `Fate`.
        became: what became of them, as a clause.
        is_structure: every value but null counts, false and 0 too.
        of: where the keys are from, for messages.
    """

    kind: SettingKind
    at: str
    names: str
    fate: Fate
    became: str
    is_structure: bool = False
    of: str = "an older release"

    def paths(self) -> Iterator[str]:
        """Their dotted paths."""
        for place in self.at.split() or [""]:
            yield from (f"{place}.{name}" if place else name for name in self.names.split())


_TOWER, _PROJECTOR, _TEXT = "image_encoder.vision_encoder", "image_encoder.vision_projector", "text_decoder"
_PARTS = f"{_TEXT} {_TOWER} {_PROJECTOR}"
_IN_DIRECTORY = "the config.json of init_from_hf_path says the model's structure; remove the key"
_IN_DIFFUSERS = "the config.json of predictor.from_pretrained, a diffusers transformer, says the structure; remove it"
_IN_AUTOENCODER = "structure comes from the config.json of ae.from_pretrained, a diffusers autoencoder"
_BETAS = (
    "the noise schedule is written in diffusion itself: model_id ddpm with num_train_timesteps, beta_start, beta_end, "
    "beta_schedule, prediction_type and rescale_betas_zero_snr; what is left out is the family's own"
)
_PREPROCESS, _DATASET, _LOADER = "dataset_param.preprocess_parameters", "dataset_param", "dataloader_param"

_MODEL = (
    Older("model", _PARTS, "is_freeze", "write", "write freeze"),
    Older(
        "model",
        f"{_TEXT} {_PROJECTOR}",
        "ckpt_path",
        "write",
        "weights are read from init_from_hf_path or --load, never for one part; put the part's weights into that "
        "directory, and remove the key",
    ),
    Older(
        "model",
        _TEXT,
        "apply_query_key_layer_scaling layernorm_zero_centered_gamma initializer_factor fp16_lm_cross_entropy "
        "language_vocab_size language_max_sequence_length lm_position_embedding_type num_key_value_heads rms_norm_eps "
        "hidden_act partial_rotary_factor attention_bias scale_depth rotary_emb_base moe_layer_num topk_method "
        "scoring_func aux_loss_alpha seq_aux q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
        "write",
        _IN_DIRECTORY,
    ),
    Older(
        "model",
        _TOWER,
        "num_channels initializer_factor ps_version downsample_ratio add_class_token class_token_len rms_norm_eps "
        "attention_bias hidden_act layernorm_zero_centered_gamma max_position_embeddings pre_tockens next_tockens",
        "write",
        _IN_DIRECTORY,
        is_structure=True,
    ),
    Older(
        "model",
        _PROJECTOR,
        "projector_type input_dim n_embed depth mlp_ratio query_num llm_dim vit_dim num_attention_heads "
        "out_hidden_size intermediate_size hidden_act",
        "write",
        _IN_DIRECTORY,
        is_structure=True,
    ),
    Older("model", "image_encoder", "tile_tag global_view_pos", "write", _IN_DIRECTORY, is_structure=True),
    Older("model", "", "add_rmsnorm_offset", "write", _IN_DIRECTORY),
    Older("model", _TEXT, "fp16", "write", "write the flag --fp16"),
    Older("model", _TEXT, "mtp_num_layers mtp_loss_scaling_factor", "absent", "multi-token prediction isn't trained"),
    Older("model", _TEXT, "reset_attention_mask", "write", "rows share a row of the batch by basic_parameters.packing"),
    Older(
        "model",
        _PARTS,
        "masked_softmax_fusion apply_rope_fusion memory_efficient_layer_norm persist_layer_norm "
        "deallocate_pipeline_outputs use_te output_hidden_states use_return_dict device variable_seq_lengths "
        "mla_mm_split mla_fa_without_pad padded_base_length "
        "mla_up_proj_tp_overlap recompute_mla_up_proj mla_zero_memory schedules_method recompute_mtp_norm "
        "recompute_mtp_layer",
        "built in",
        "kernels, memory and layout follow from the flags and fsdp2.yaml",
    ),
    Older(
        "model",
        "",
        f"{_TEXT}.bias_dropout_fusion {_TEXT}.context_parallel_size {_TOWER}.context_parallel_size "
        f"{_TOWER}.sequence_parallel",
        "built in",
        "kernels, memory and layout follow from the flags and fsdp2.yaml",
    ),
    Older("model", "", "frames resolution", "built in", "data.json's num_frames, max_height and max_width say it"),
    Older("model", "", "allow_tf32", "write", "write the flag --allow-tf32"),
    Older("model", "", "model_max_length", "write", "write text_encoder.max_length", is_structure=True),
    Older("model", "", "text_input_ids_pad", "built in", "captions are encoded as the model's diffusers pipeline does"),
    Older("model", "", "micro_batch_size", "built in", "inference_sora.py makes one sample after the other"),
    Older("model", "", "eval_config", "write", "score samples with evaluate_gen.py (docs/inference.md); remove it"),
    Older(
        "model",
        "predictor",
        "input_size dropout cross_attention_dim attention_bias attention_q_bias attention_k_bias attention_v_bias "
        "patch_type patch_size_thw activation_fn num_embeds_ada_norm norm_type norm_elementwise_affine norm_eps "
        "norm_out_eps caption_channels time_embed_dim text_length text_hidden_size concat_text_embed "
        "interpolation_scale learnable_pos_embed ofs_embed_dim use_rope space_scale time_scale sparse1d sparse_n "
        "mlp_ratio vec_in_dim context_in_dim axes_dim fused_qkv i2v_condition_type skip_connection "
        "skip_connection_zero_init",
        "write",
        _IN_DIFFUSERS,
        is_structure=True,
    ),
    Older("model", "predictor", "embeded_guidance_scale", "write", "write diffusion.guidance"),
    Older(
        "model",
        "predictor",
        "double_stream_full_recompute_layers single_stream_full_recompute_layers enable_sequence_parallelism "
        "enable_flashattn use_liger_rope fa_layout",
        "built in",
        "kernels are diffusers' own, and fsdp2.yaml's recompute_modules saves memory",
    ),
    Older("model", "diffusion", "sigma_sampler_config denoiser_config scheduler_config", "write", _BETAS),
    Older("model", "diffusion", "noise_offset", "absent", "no constant is added to the noise; write 0"),
    Older("model", "diffusion", "snr_gamma", "absent", "timesteps aren't weighted by min-SNR; remove it (weighting)"),
    Older(
        "model", "diffusion", "sample_method t_sample_method", "write", "write sampling: uniform, logit_normal or mode"
    ),
    Older(
        "model",
        "diffusion",
        "use_timestep_transform",
        "write",
        "write shift, or use_dynamic_shifting with base_shift and max_shift",
    ),
    Older("model", "diffusion", "timestep_respacing device", "built in", "it belongs to sampling"),
    Older(
        "model",
        "text_encoder",
        "model_type using_kwargs",
        "built in",
        "the encoder's class is the one of its directory",
    ),
    Older("model", "ae", "from_pretrained_3dvae_ckpt", "write", "write from_pretrained, a diffusers directory"),
    Older("model", "ae", "shift scale", "write", "write shift_factor and scaling_factor", is_structure=True),
    Older(
        "model",
        "ae",
        "tile_overlap_factor tile_sample_min_size tile_latent_min_size tile_sample_min_size_t tile_latent_min_size_t "
        "use_spatial_tiling use_temporal_tiling vae_micro_frame_size",
        "built in",
        "tiles save memory only: enable_tiling, and their sizes in tiling_param",
    ),
    Older("model", "ae", "cal_loss freeze_vae_2d", "built in", "the autoencoder is never trained"),
    Older(
        "model",
        "ae",
        "cp_size vae_cp_size enable_sequence_parallelism encoder_gather_norm decoder_gather_norm output_dtype",
        "built in",
        "each rank encodes its own clips, in ae.dtype",
    ),
    Older(
        "model",
        "ae",
        "conv_padding num_res_blocks hidden_size_mult encoder_attention encoder_nonlinearity encoder_conv_in "
        "encoder_conv_out encoder_mid_resnet encoder_resnet_blocks encoder_spatial_downsample "
        "encoder_temporal_downsample decoder_attention decoder_nonlinearity decoder_conv_in decoder_conv_out "
        "decoder_mid_resnet decoder_resnet_blocks decoder_spatial_upsample decoder_temporal_upsample use_quant_layer "
        "norm_num_groups down_block_types up_block_types time_compression_ratio mid_block_add_attention act_fn "
        "base_channels decoder_energy_flow_hidden_size decoder_num_resblocks dropout encoder_energy_flow_hidden_size "
        "encoder_num_resblocks latent_dim use_attention norm_type t_interpolation connect_res_layer_num "
        "vae_scale_factor",
        "built in",
        _IN_AUTOENCODER,
    ),
    Older(
        "model",
        "ae.i2v_processor",
        "noised_image_dropout noised_image_input noised_image_all_concat",
        "absent",
        "the first frame becomes a condition as the model's diffusers pipeline does it; remove it",
    ),
    Older(
        "model",
        "pipeline_config",
        "embedded_guidance_scale use_dynamic_cfg vae_invert_scale_latents",
        "absent",
        "samples are made as the model's diffusers pipeline does it; remove it",
    ),
    Older(
        "model", "pipeline_config", "use_tiling", "built in", "tiles save memory only: write ae.enable_tiling for them"
    ),
    Older("model", "pipeline_config", "version model_type", "built in", "the predictor's family and the task say it"),
)

_DATA = (
    Older(
        "data",
        _DATASET,
        "use_feature_data",
        "write",
        "write dataset_type: feature, with load_video_features in model.json",
    ),
    Older("data", _DATASET, "enable_text_preprocess", "write", "write enable_text_preprocessing", is_structure=True),
    Older(
        "data",
        _DATASET,
        "mask_type_ratio_dict_video mask_type_ratio_dict_image video_mask_ratios min_clear_ratio max_clear_ratio",
        "absent",
        "frames aren't masked at random; write model.json's task: i2v for clips that begin with a given frame",
    ),
    Older(
        "data", _DATASET, "mm_use_im_start_end", "absent", "the chat template says where pictures stand; write false"
    ),
    Older("data", "dataset_param.basic_parameters", "return_type", "built in", "rows have one shape"),
    Older(
        "data",
        "dataset_param.basic_parameters",
        "data_config",
        "write",
        "write data_path, a file or a list of files",
    ),
    Older("data", _PREPROCESS, "fps", "write", "write train_fps", is_structure=True),
    Older(
        "data", _PREPROCESS, "skip_frame_num", "write", "write frame_interval: every so many frames", is_structure=True
    ),
    Older(
        "data",
        _PREPROCESS,
        "data_process_type item_processor_type",
        "write",
        "train_pipeline says what frames become; remove it",
    ),
    Older("data", _PREPROCESS, "dataloader_num_workers", "built in", "the number of workers comes from --num-workers"),
    Older("data", _PREPROCESS, "vae_scale_factor", "built in", "the model says what shapes it takes"),
    Older("data", _PREPROCESS, "seed", "built in", "the seed comes from --seed"),
    Older(
        "data",
        _PREPROCESS,
        "train_pipeline_after_resize",
        "write",
        "write these steps at the end of train_pipeline",
    ),
    Older(
        "data",
        f"{_PREPROCESS}.train_pipeline",
        "crop_size do_center_crop do_convert_rgb do_normalize do_rescale do_resize pad2square image_mean image_std "
        "resample rescale_factor size",
        "write",
        "the preprocessor_config.json of model_name_or_path says it; change it there, and remove the key",
        is_structure=True,
    ),
    Older(
        "data",
        _LOADER,
        "bucket_config num_bucket_build_workers",
        "write",
        "write dataset_param.preprocess_parameters.buckets: a list of [frames, height, width]",
    ),
    Older(
        "data",
        f"{_DATASET}.tokenizer_config",
        "cache_dir low_cpu_mem_usage",
        "built in",
        "the tokenizer is read from its directory",
    ),
    Older("data", f"{_LOADER}.collate_param", "pad_token_id", "built in", "the tokenizer says which token pads"),
)

_FSDP2 = (
    Older("fsdp2", "", "zero3_size", "write", "write sharding_size", is_structure=True),
    Older("fsdp2", "", "sharding_strategy", "write", "write sharding_size and reshard_after_forward"),
    Older("fsdp2", "", "transformer_layers", "write", "write sub_modules_to_wrap, paths of modules"),
    Older("fsdp2", "", "cpu_offload", "write", "write offload_to_cpu"),
    Older(
        "fsdp2",
        "",
        "forward_prefetch backward_prefetch limit_all_gathers use_orig_params sync_module_states",
        "built in",
        "units are prefetched by num_to_forward_prefetch and num_to_backward_prefetch",
    ),
    Older("fsdp2", "", "mixed_precision", "write", "write param_dtype and reduce_dtype", is_structure=True),
    Older("fsdp2", "", "gradient_checkpointing", "write", "write recompute_modules, paths of modules"),
)


def _of_trainers(names: str, became: str, fate: Fate = "write") -> Older:
    """Keys of the section `parallel` of other FSDP2 trainers' files, where fsdp2.yaml has other names."""
    return Older("fsdp2", "", names, fate, became, of="another trainer's file")


_CONTEXT_FLAGS = "write the flags --context-parallel-size and --context-parallel-algo"
_OF_TRAINERS = (
    _of_trainers("parallel", "write its keys at the top of the file, under the names that they have here"),
    _of_trainers("fsdp_size fully_shard_parallel_size", "write sharding_size"),
    _of_trainers("fsdp_modules", "write sub_modules_to_wrap"),
    _of_trainers("fsdp_plan", "write apply_modules as sub_modules_to_wrap, the others at the top of the file"),
    _of_trainers("apply_modules", "write sub_modules_to_wrap, or moe_modules for experts"),
    _of_trainers("tp_size tensor_parallel_size", "write the flag --tensor-model-parallel-size"),
    _of_trainers("tp_plan colwise_parallel rowwise_parallel", "write tp_colwise and tp_rowwise"),
    _of_trainers("cp_size context_parallel_size", _CONTEXT_FLAGS),
    _of_trainers("cp_type", f"{_CONTEXT_FLAGS}: ulysses is ulysses_cp_algo, ring is megatron_cp_algo"),
    _of_trainers(
        "ulysses_parallel_size ring_attention_size",
        f"{_CONTEXT_FLAGS}: the size is the product of both; where both are above 1, write hybrid_cp_algo and "
        "--ulysses-degree-in-cp",
    ),
    _of_trainers("ep_size expert_model_parallel_size", "write expert_parallel_size"),
    _of_trainers("ep_modules", "write moe_modules"),
    _of_trainers("ep_plan", "write apply_modules as moe_modules; tokens reach their experts by all-to-all"),
    _of_trainers("ep_fsdp_modules apply_efsdp_modules", "ep_fsdp_size shards all of moe_modules; remove it"),
    _of_trainers("expert_fully_shard_parallel_size", "write ep_fsdp_size"),
    _of_trainers(
        "efsdp_shard_placement_fn shard_placement_fn",
        "parameters are sharded along dim 0, experts along dim 1, which changes no number",
        "built in",
    ),
    _of_trainers("ep_dispatcher", "tokens reach their experts by all-to-all, whose numbers are the same", "built in"),
    _of_trainers("data_parallel_size", "it follows from the number of processes", "built in"),
    _of_trainers("recompute recompute_plan", "write recompute_modules, paths of modules"),
)

_MLA = "the config.json of init_from_hf_path says the model's structure; remove the flag"
_FLAGS = (
    Older(
        "flag",
        "",
        "multi_head_latent_attention q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim "
        "rope_scaling_type rope_scaling_factor rope_scaling_mscale rope_scaling_mscale_all_dim rope_scaling_beta_fast "
        "rope_scaling_beta_slow rope_scaling_original_max_position_embeddings rope_type noop_layers",
        "write",
        _MLA,
    ),
    Older("flag", "", "use_ema", "write", "write --ema-decay, e.g. 0.9999, or use_ema in model.json"),
    Older("flag", "", "sp_size", "write", "write --context-parallel-size"),
    Older("flag", "", "seq_len", "write", "write --seq-length"),
    Older("flag", "", "use_torch_fsdp1 fsdp_config_path", "write", "write --use-torch-fsdp2 and --fsdp2-config-path"),
    Older("flag", "", "reset_position_ids reset_attention_mask", "write", "write data.json's basic_parameters.packing"),
    Older("flag", "", "eod_mask_loss", "write", "the chat template says which tokens are targets; remove it"),
    Older(
        "flag",
        "",
        "fp8 fp8_format fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_param_gather "
        "no_fp8_wgrad",
        "absent",
        "layers out of Megatron-core's modules don't compute in 8 bits, as they aren't Transformer Engine's; with "
        "--use-torch-fsdp2 write float8_recipe in fsdp2.yaml (tensorwise for hybrid, rowwise for e4m3), and --bf16",
    ),
    Older(
        "flag",
        "",
        "use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
        "absent",
        "the optimizer's state is float32; remove it",
    ),
    Older("flag", "", "skip_train", "absent", "an entry script trains; write --train-iters"),
    Older("flag", "", "use_checkpoint_args", "write", "flags aren't read from checkpoints; write them out"),
    Older("flag", "", "actor_rollout dpo_data_type", "absent", "preference training is not there yet"),
    Older("flag", "", "enable_encoder_dp", "write", "write enable_encoder_dp: true in model.json"),
    Older(
        "flag",
        "",
        "moe_permutation_async_comm moe_zero_memory moe_zero_memory_num_layers moe_allgather_overlap_comm "
        "recompute_in_advance recompute_activation_function recompute_norm recompute_norm_num_layers "
        "adaptive_recompute_device_size adaptive_recompute_device_swap enable_recompute_layers_per_pp_rank smart_swap "
        "use_ascend_mc2 use_ascend_coc ampipe_degree use_pipe_experts optimize_send_recv_comm enable_share_memory "
        "automated_pipeline automated_pipeline_perf nanopipe use_nd_matmul enable_token_rearrange_opt tp_2d tp_x tp_y "
        "enable_overlap_ag_with_matmul enable_backward_overlap_ag_with_matmul interleave_ep_tp legacy_fsdp_ckpt "
        "kv_head_repeat_before_uly_alltoall attention_mask_on_cpu gemm_gradient_accumulation_fusion "
        "schedules_method no_persist_layer_norm data_parallel_random_init ddp_bucket_size no_align_grad_reduce "
        "defer_embedding_wgrad_compute tp_comm_overlap context_parallel_kv_cache_policy hybrid_gradient_checkpointing "
        "prof_file",
        "built in",
        "it changed how the same numbers are computed, not which",
    ),
    Older(
        "flag",
        "",
        "no_pad_to_seq_lengths tokenizer_padding_side",
        "built in",
        "rows are padded to the longest of their micro-batch, on the right",
    ),
)

OLDER: tuple[Older, ...] = (*_MODEL, *_DATA, *_FSDP2, *_OF_TRAINERS, *_FLAGS)

#: entry script or command → flags of its own, with underscores; those of a training, and those that other trainers
#: have too (`--dtype`, `--save-dir`), aren't listed
FLAGS_OF_OTHERS: dict[str, str] = {
    "inference_sora.py": "ema low_noise_predictor low_noise_lora_load prompts images save_path size fps "
    "num_inference_steps guidance_scale negative_prompt sampler shift num_samples_per_prompt cpu_offload",
    "inference_vlm.py": "do_sample enable_thinking image audio max_new_tokens merge_adapter processor_path "
    "prompt repetition_penalty stop temperature top_k top_p video num_beams",
    "evaluate_vlm.py": "benchmark category language limit score",
    "evaluate_gen.py": "features_a features_b samples clip frames neighbours subset subsets",
    "mm-convert": "hf_dir dcp_dir model_assets_dir base_hf_dir save_hf_dir origin_hf_dir is_lora_base to_bf16 "
    " tie_weight_mapping dcp_prefix hf_prefix lora_rank speaker_name speaker_audio_path",
    "mindspeed-mm serve": "host port served_model_name api_key_file media_root media_hosts max_requests "
    "max_request_mib max_media max_image_pixels max_prompt_tokens max_answer_tokens media_workers drain_seconds engine",
    "mindspeed-mm data extract-features": "only validation shard_megabytes",
    "mindspeed-mm data check": "data_json rows decode",
    "posttrain_flux_dancegrpo.py": "adv_clip_max cache_dir cfg clip_range eta h hps_reward_save ignore_last "
    "init_same_noise no_save_images num_generations num_latent_t sample_batch_size sampler_seed sampling_steps t "
    "timestep_fraction train_sp_batch_size use_group use_hpsv2 w prompt_dir output_dir sample_num",
    "a command that prepares data, which a launch script runs before the training": "src_dir des_dir num_processes "
    "onnx_path instruct num_utts_per_parquet dir",
}
#: those that there are here
SCRIPTS_HERE = (
    "inference_sora.py",
    "inference_vlm.py",
    "evaluate_gen.py",
    "evaluate_vlm.py",
    "mm-convert",
    "mindspeed-mm serve",
    "mindspeed-mm data extract-features",
    "mindspeed-mm data check",
)
