"""Flags about the data, and about what a run logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mindspeed_mm.configs.eval_metrics import METRIC_SYNONYMS, AnswerScoreName, TranscriptLanguage
from mindspeed_mm.configs.flags.spec import flag, no_effect

_ONE_LOGGER = no_effect("there is no writer for it: --report-to names the trackers that there are")


@dataclass(frozen=True)
class DataArguments:
    """Data."""

    mm_data: Annotated[str | None, flag("data.json", path="file")] = None
    mm_tool: Annotated[str | None, flag("tools.json; absent = all tools off", path="file")] = None
    seq_length: Annotated[
        int | None, flag("longest row, in tokens; absent = data.json's cutoff_len, else no limit", minimum=1)
    ] = None
    num_workers: Annotated[int, flag("processes that prepare batches; 0 = in the training process", minimum=0)] = 2


@dataclass(frozen=True)
class LoggingArguments:
    """Evaluation and logging."""

    log_interval: Annotated[
        int, flag("steps between two log lines; the first ten steps and the last one have a line too", minimum=1)
    ] = 10
    log_format: Annotated[
        Literal["auto", "full", "short", "live"],
        flag(
            "ours: full = the published log line; short = lines of 120 columns: unless log-interval is given, about 25 "
            "in all and one every 30 s at least; live = one line that is renewed, on a terminal; auto = full, but "
            "for what mindspeed-mm train starts other than a bash script: live on a terminal, else short"
        ),
    ] = "auto"
    eval_interval: Annotated[
        int | None, flag("steps between two evaluations; 0 or None = no evaluation", minimum=0)
    ] = 1000
    eval_iters: Annotated[int, flag("global batches in one evaluation; 0 = no evaluation", minimum=0)] = 100
    eval_generate: Annotated[
        AnswerScoreName | None,
        flag(
            "ours: at each evaluation, answer validation rows greedily and score the answers; without a value "
            "exact_match",
            bare="exact_match",
            synonyms=METRIC_SYNONYMS,
        ),
    ] = None
    eval_generate_language: Annotated[
        TranscriptLanguage | None,
        flag("ours: of eval-generate wer: language of the transcripts; absent = as in any language"),
    ] = None
    eval_generate_rows: Annotated[
        int, flag("ours: of eval-generate: the first so many validation rows are answered", minimum=1)
    ] = 64
    eval_generate_batch_size: Annotated[
        int, flag("ours: of eval-generate: rows that a process answers at a time", minimum=1)
    ] = 8
    eval_max_new_tokens: Annotated[int, flag("ours: of eval-generate: longest answer in tokens", minimum=1)] = 128
    sample_interval: Annotated[
        int | None,
        flag(
            "ours: of a model that makes pictures or videos: steps between two sheets of samples, made for the report; "
            "absent = none",
            minimum=1,
        ),
    ] = None
    sample_prompts: Annotated[
        str | None,
        flag(
            "ours: of sample-interval: text file, one prompt a line, eight at most; absent = four captions of the "
            "validation rows, else of the training rows",
            path="file",
        ),
    ] = None
    sample_size: Annotated[
        list[int] | None,
        flag("ours: of sample-interval: frames, height and width in pixels; absent = the first row's shape", minimum=1),
    ] = None
    sample_inference_steps: Annotated[int, flag("ours: of sample-interval: denoising steps", minimum=1)] = 20
    sample_guidance_scale: Annotated[
        float | None,
        flag("ours: of sample-interval: classifier-free guidance; absent = the pipeline's own scale", minimum=0),
    ] = None
    report: Annotated[
        bool,
        flag(
            "ours: make a report of the run, <save>/report.html, and renew it while the run trains",
            off_spellings=("--no-report",),
        ),
    ] = True
    log_row_ids: Annotated[
        bool, flag("each rank records which rows each step trained on: <save>/rows/rank<k>.jsonl")
    ] = False
    log_tps: Annotated[bool, no_effect("tokens per second are always logged")("tokens")] = False
    log_throughput: Annotated[
        bool, no_effect("TFLOP/s per device are always logged, where the model's FLOPs are known")("TFLOP/s per device")
    ] = False
    log_timers_to_tensorboard: Annotated[bool, no_effect("step and data-wait times are always logged")("timers")] = (
        False
    )
    log_validation_ppl_to_tensorboard: Annotated[
        bool, no_effect("perplexity is e to the logged loss")("perplexity")
    ] = False
    log_memory_to_tensorboard: Annotated[bool, no_effect("memory is in metrics.jsonl")("memory")] = False
    log_params_norm: Annotated[
        bool, no_effect("it would cost a pass over all weights at each step")("norm of the weights")
    ] = False
    log_num_zeros_in_grad: Annotated[
        bool, no_effect("it would cost a pass over all gradients at each step")("zeros in gradients")
    ] = False
    enable_one_logger: Annotated[bool, _ONE_LOGGER("report the run to one_logger")] = False
    one_logger_project: Annotated[str | None, _ONE_LOGGER("one_logger's project")] = None
    one_logger_run_name: Annotated[str | None, _ONE_LOGGER("one_logger's run")] = None
    one_logger_async: Annotated[bool, _ONE_LOGGER("report asynchronously")] = False
