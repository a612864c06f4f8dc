"""Published keys of data.json of generation models: why some have no effect here or are refused."""

from __future__ import annotations

from mindspeed_mm.configs.data_rules import SAMPLERS, SAMPLERS_NOT_YET
from mindspeed_mm.configs.published import NoEffect, Refused, is_on

BUCKET_SAMPLER = "variable_video_batch_sampler"
GENERATION_SAMPLERS = (*SAMPLERS, BUCKET_SAMPLER)
GENERATION_SAMPLERS_NOT_YET = tuple(name for name in SAMPLERS_NOT_YET if name != BUCKET_SAMPLER)

_PREPROCESS = "dataset_param.preprocess_parameters"

REFUSED_GENERATION_DATA_KEYS = (
    Refused(f"{_PREPROCESS}.use_aesthetic", is_on, "aesthetic scores aren't written into captions; write false"),
    Refused("dataset_param.use_img_from_vid", is_on, "give pictures as rows of their own; write false"),
    Refused("dataset_param.use_img_num", is_on, "give pictures as rows of their own; write 0"),
    Refused("dataset_param.vid_img_fusion_by_splicing", is_on, "give pictures as rows of their own; write false"),
)

IDLE_GENERATION_DATA_KEYS = (
    NoEffect(rf"{_PREPROCESS}\.(video|image)_reader_type", "PyAV reads videos and Pillow pictures"),
    NoEffect(
        rf"{_PREPROCESS}\.(video_processor_type|image_processer_type)",
        "train_pipeline says what frames and pictures become",
    ),
    NoEffect(rf"{_PREPROCESS}\.vae_(stride|patch_size)", "the model says what shapes it takes"),
    NoEffect(
        rf"{_PREPROCESS}\.truncate_t_by_sp", "a clip has the frames of its bucket, which no parallel size changes"
    ),
    NoEffect(
        rf"{_PREPROCESS}\.train_pipeline\.first_frame.*",
        "the model makes its condition of the clip's first frame as its diffusers pipeline does",
    ),
    NoEffect(
        r"dataset_param\.(use_text_processer|support_chinese)",
        "captions are encoded by the model's own tokenizer and text encoder",
    ),
    NoEffect(
        r"dataset_param\.tokenizer_config\..*",
        "captions are tokenized as the model's diffusers pipeline does it",
    ),
    NoEffect(r"dataloader_param\.num_workers", "the number of workers comes from --num-workers"),
    NoEffect(r"dataloader_param\.batch_size", "batch sizes come from --micro-batch-size and --global-batch-size"),
    NoEffect(r"dataloader_param\.seed|dataset_param\.basic_parameters\.data_seed", "the seed comes from --seed"),
    NoEffect(r"dataloader_param\.initial_global_step_for_sampler", "a checkpoint's consumed samples are the position"),
    NoEffect(r"dataloader_param\.data_sharding", "the order of rows is global, however many ranks share them"),
    NoEffect(r"dataloader_param\.(group_.*|priority_mode)", "rows are put together by the shape of their bucket"),
    NoEffect(r"dataloader_param\.enable_preload", "the loader's workers read ahead by themselves"),
    NoEffect(r"dataloader_param\.collate_param.*", "samples of a batch have one shape, and nothing is padded"),
    NoEffect(r".*", "it belongs to another dataset type"),
)
