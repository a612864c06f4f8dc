"""Names in published data.json files, and why some of their keys have no effect here or are refused."""

from __future__ import annotations

from mindspeed_mm.configs.published import NoEffect, Refused, is_given, is_on

SAMPLERS = (
    "BaseRandomBatchSampler",
    "SequentialSampler",
    "stateful_distributed_sampler",
    "LengthGroupedSampler",
    "BucketBatchSampler",
)
SAMPLERS_NOT_YET = (
    "AESampler",
    "LuminaMetaLenDistSampler",
    "variable_video_batch_sampler",
    "custom",
)

COLLATORS = (
    "qwen2vl",
    "qwen3vl",
    "qwen3omni",
    "internvl",
    "glm4v_moe",
    "llm_pretrain",
    "qwen3asr",
    "step3_vl",
    "whisper",
    "deepseekvl2",
    "videoalign",
    "open_sora_plan",
    "bagel",
    "ltx2",
    "funasr",
    "custom",
)

#: published template names for the chat template that the models of one family bring with them
MODELS_OWN_TEMPLATES = (
    "glm4.1v",
    "glm4v_moe",
    "mistral",
    "qwen2_omni",
    "qwen3_omni",
    "qwen3_asr",
    "kimi_k25",
    "kimi_k3",
    "step3_vl",
    "gpt",
    "gpt_oss",
)

_BASIC = "dataset_param.basic_parameters"

REFUSED_DATA_KEYS = (
    Refused(f"{_BASIC}.use_pmcc_data", is_on, "this record format is not there; write false"),
    Refused(
        "dataset_param.preprocess_parameters.use_audio_in_video",
        is_on,
        "a video's sound is not interleaved with its frames yet; write false and give the sound as an audio of the row",
    ),
    Refused(f"{_BASIC}.chat_template", is_given, "a template of one's own is not there yet; write 'template'"),
    Refused(
        "dataset_param.use_thumbnail",
        lambda value: value is not None and not is_on(value),
        "the processor always adds the whole picture to its tiles; write true, and dynamic_image_size: false for "
        "pictures without tiles",
    ),
    Refused(
        "dataset_param.template_name",
        lambda value: is_given(value) and not str(value).startswith("internvl"),
        "only the template of the model's own directory stands for such a name (internvl…); name another one with "
        "basic_parameters.template",
    ),
    Refused(
        "dataset_param.tokenizer_config.add_eos_token",
        is_on,
        "the chat template says where an end token stands; write false",
    ),
    Refused(
        "val_dataset_param.basic_parameters.dataset", is_given, f"write the validation file as '{_BASIC}.val_dataset'"
    ),
)

IDLE_DATA_KEYS = (
    NoEffect(
        rf"{_BASIC}\.(preprocessing_batch_size|async_preprocess.*)",
        "rows are prepared in the loader's workers, in order and in advance",
    ),
    NoEffect(
        r"dataset_param\.preprocess_parameters\.(image|video)_resolution",
        "image_max_pixels and video_max_pixels are the limits",
    ),
    NoEffect(r"dataloader_param\.num_workers", "the number of workers comes from --num-workers"),
    NoEffect(r"dataloader_param\.batch_size", "batch sizes come from --micro-batch-size and --global-batch-size"),
    NoEffect(r"dataloader_param\.seed|dataset_param\.basic_parameters\.data_seed", "the seed comes from --seed"),
    NoEffect(r"dataloader_param\.initial_global_step_for_sampler", "a checkpoint's consumed samples are the position"),
    NoEffect(r"dataloader_param\.data_sharding", "the order of rows is global, however many ranks share them"),
    NoEffect(r"dataloader_param\.group_.*", "rows are grouped by what they cost"),
    NoEffect(r"dataloader_param\.enable_preload", "the loader's workers read ahead by themselves"),
    NoEffect(
        r"dataset_param\.tokenizer_config(\..*)?",
        "the tokenizer comes from dataset_param.preprocess_parameters.model_name_or_path",
    ),
    NoEffect(
        r"dataset_param\.(template_name|patch_size|down_sample_ratio|use_thumbnail)",
        "the model's own processor and chat template decide",
    ),
    NoEffect(
        r"dataset_param\.preprocess_parameters\.(image_reader_type|video_reader_type|image_processer_type)",
        "Pillow reads pictures and PyAV videos, and the model's own processor makes pixel values of them",
    ),
    NoEffect(r"dataset_param\.use_text_processer", "rows always become tokens by the chat template"),
    NoEffect(r"dataset_param\.group_by_length", "write dataloader_param.sampler_type: LengthGroupedSampler"),
    NoEffect(r"val_dataset_param(\..*)?", "validation rows come from dataset_param.basic_parameters.val_dataset"),
    NoEffect(r".*", "it belongs to a dataset type other than huggingface"),
)
