"""The keys of train_fsdp2.py's YAML file, typed: model, parallel, data, training.

What each becomes is in `configs/dialects/llm_fsdp2.py`.

Source: the argument list that MindSpeed-LLM publishes for its FSDP2 backend.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from mindspeed_mm.configs.data_config import MaybeNames, Names, Shares, read_row_limit
from mindspeed_mm.configs.fsdp2_config import Paths
from mindspeed_mm.configs.model_config import Plugins
from mindspeed_mm.configs.scalars import read_float, read_int
from mindspeed_mm.configs.sections import (
    Above0,
    AtLeast0,
    Bool,
    Count,
    DtypeName,
    Float,
    Int,
    Section,
    Size,
    Texts,
    one_of,
)
from mindspeed_mm.configs.tools_config import Ranks

FractionBelow1 = Annotated[Float, Field(ge=0, lt=1)]


def _read_modules(value: object) -> object:
    if not isinstance(value, list) or not value:
        raise ValueError("expected a list of module paths, such as model.layers.{*}, that isn't empty")
    return value


def _read_steps(value: object) -> object:
    """A number of steps; null, 0 and -1 mean none."""
    if value is None:
        return None
    number = read_int(value)
    if number < -1:
        raise ValueError("expected a whole number from 1 on; null, 0 or -1 for none")
    return number if number > 0 else None


def _read_val_size(value: object) -> object:
    """A number of rows, or a share of them; null and 0 mean none."""
    number = 0.0 if value is None else read_float(value)
    if number < 0 or (number > 1 and not number.is_integer()):
        raise ValueError("expected a number of rows, or a share of them between 0 and 1")
    if isinstance(value, int) or number > 1:
        return int(number)
    if number == 1:
        raise ValueError("expected a share of the rows below 1, or a whole number of them such as 1")
    return number


Modules = Annotated[list[str], BeforeValidator(_read_modules)]
StepCount = Annotated[int | None, BeforeValidator(_read_steps)]


class LlmModel(Section):
    """`model`."""

    model_name_or_path: str = Field(description="HF directory: configuration, weights, tokenizer. Required")
    model_id: str | None = Field(None, description="registered family or HF model_type; null = the HF architecture")
    plugin: Plugins = Field([], description="ours: modules imported first; they may register models")
    tokenizer_name_or_path: str | None = Field(None, description="directory of the tokenizer, where it is another one")
    init_model_with_meta_device: Bool = Field(False, description="build without memory, then load or draw each shard")
    train_from_scratch: Bool = Field(False, description="random weights; those of the directory stay unread")
    trust_remote_code: Bool = Field(False, description="run code that comes with the directory")
    use_fast_tokenizer: Bool = Field(True, description="the fast version is always used: exact targets need it")
    split_special_tokens: Bool = Field(False, description="special tokens typed into a text are split like any text")
    resize_vocab: Bool = Field(False, description="grow the embedding: refused")
    add_tokens: str | None = Field(None, description="new tokens, separated by commas: refused")
    add_special_tokens: str | None = Field(None, description="new special tokens, separated by commas: refused")
    new_special_tokens_config: str | None = Field(None, description="file that describes new tokens: refused")
    init_special_tokens: Annotated[str, one_of(("noise_init", "desc_init", "desc_init_w_noise"))] = Field(
        "noise_init", description="how rows of new tokens begin: no effect without new tokens"
    )
    cache_dir: str | None = Field(None, description="no effect: nothing is fetched")
    model_revision: str | None = Field(None, description="no effect: nothing is fetched")
    quant_recipe_name: str | None = Field(None, description="low precision: refused")
    quant_apply_modules: list[str] | None = Field(None, description="no effect without quant_recipe_name")
    quant_ignored_modules: list[str] | None = Field(None, description="no effect without quant_recipe_name")


class LlmParallel(Section):
    """`parallel`. Module paths are patterns as in fsdp2.yaml."""

    fsdp_size: Count = Field(1, description="ranks that share one copy of the parameters")
    fsdp_modules: Modules = Field(description="module paths that become FSDP units of their own. Required")
    ignored_modules: Paths | None = Field(None, description="module paths that stay whole on every rank")
    reshard_after_forward: Bool = Field(True, description="free gathered parameters after forward")
    shard_placement_fn: str | None = Field(None, description="no effect: FSDP2's own choice of the dimension")
    efsdp_shard_placement_fn: str | None = Field(None, description="no effect: FSDP2's own choice of the dimension")
    tp_size: Count = Field(1, description="ranks that split the layers")
    tp_colwise: Paths | None = Field(
        None, description="linear layers whose outputs are split, also as *.q_proj; null = the family's own"
    )
    tp_rowwise: Paths | None = Field(
        None, description="linear layers whose inputs are split, also as *.o_proj; null = the family's own"
    )
    ep_size: Count = Field(1, description="ranks that split the experts of a layer")
    ep_modules: Paths | None = Field(None, description="module paths of the experts; null = all that are known")
    ep_fsdp_size: Count = Field(1, description="ranks that shard each rank's experts further")
    ep_fsdp_modules: Paths | None = Field(None, description="must be those of ep_modules")
    ep_dispatcher: Annotated[str, one_of(("eager", "fused", "mc2"))] = Field(
        "eager", description="no effect: tokens go to their experts in one way, which computes the same"
    )
    recompute: Bool = Field(False, description="recompute activations in the backward pass")
    recompute_modules: Paths | None = Field(None, description="of these modules; null = model.layers.{*}")
    cp_size: Count = Field(1, description="ranks that split the tokens of the same rows")
    cp_type: Annotated[str, one_of(("ulysses", "ring"))] = Field("ulysses", description="how they exchange them")
    param_dtype: DtypeName = Field("bf16", description="dtype of the computation, over fp32 master weights")
    reduce_dtype: DtypeName = Field("fp32", description="dtype that gradients are summed in over ranks")
    num_to_forward_prefetch: Size = Field(1, description="units prefetched in forward")
    num_to_backward_prefetch: Size = Field(1, description="units prefetched in backward")


class LlmData(Section):
    """`data`."""

    dataset: Names = Field(
        description="names in dataset_info.json, separated by commas; an entry as that file has them; or a data file"
    )
    eval_dataset: MaybeNames = Field(None, description="validation data set(s), written like dataset")
    val_size: Annotated[int | float, BeforeValidator(_read_val_size)] = Field(
        0, description="rows of dataset that are kept for validation instead: a number, or a share below 1"
    )
    dataset_dir: str = Field("./configs/fsdp2/data", description="folder of dataset_info.json and of its files")
    template: str | None = Field(None, description="name of a chat template; null = the tokenizer's own")
    cutoff_len: Count = Field(2048, description="longest row in tokens")
    train_on_prompt: Bool = Field(False, description="prompts are targets too")
    mask_history: Bool = Field(False, description="only the last answer of a row is a target")
    streaming: Bool = Field(False, description="rows are found while training goes on")
    buffer_size: Count = Field(16384, description="streaming: rows that the shuffle buffer holds")
    mix_strategy: Annotated[str, one_of(("concat", "interleave_under", "interleave_over"))] = Field(
        "concat", description="several data sets: one after the other, or drawn until the first / the last has ended"
    )
    interleave_probs: Shares = Field(None, description="interleaving: share of each data set")
    max_samples: Annotated[int | None, BeforeValidator(read_row_limit)] = Field(
        None, description="upper bound on the rows of each data set"
    )
    overwrite_cache: Bool = Field(
        False, description="make the tokens anew; only with tokenized_path, packed epochs, or mg"
    )
    preprocessing_batch_size: Count = Field(1000, description="no effect: rows are tokenised one by one")
    preprocessing_num_workers: Count | None = Field(
        None, description="processes that make the tokens; only with tokenized_path, packed epochs, or mg"
    )
    packing: Bool = Field(
        False, description="several samples share a row of cutoff_len tokens and never see each other"
    )
    neat_packing: Bool = Field(False, description="the same")
    tool_format: str | None = Field(None, description="must be null: tool calls are written as the template does")
    default_system: str | None = Field(None, description="system text of rows that have none")
    enable_thinking: Bool = Field(True, description="passed to the chat template")
    tokenized_path: str | None = Field(
        None, description="folder of the tokens, made there before training and taken from there by the next run"
    )
    data_manager_type: Annotated[str, one_of(("lf", "mg"))] = Field(
        "lf", description="lf: rows as above; mg: documents for pretraining in rows of cutoff_len tokens"
    )
    split: str | list[float] | None = Field(
        None, description="mg: shares of the documents for training, validation and test; null = 100,0,0"
    )
    append_eod: Bool = Field(False, description="mg: an end token after each document")
    reset_position_ids: Bool = Field(
        False, description="mg: positions begin anew with each document; only with reset_attention_mask"
    )
    reset_attention_mask: Bool = Field(
        False, description="mg: documents don't see each other, and positions begin anew; needs append_eod"
    )
    create_attention_mask_in_dataloader: Bool = Field(
        False, description="mg: no effect: attention is given the bounds of documents, not a mask"
    )
    no_shared_storage: Bool = Field(
        False, description="mg: no effect: the first process of each node builds the index where it finds none"
    )
    ignore_pad_token_for_loss: Bool = Field(True, description="padding is never a target, whatever this says")

    @model_validator(mode="after")
    def _agree(self) -> LlmData:
        if self.train_on_prompt and self.mask_history:
            raise ValueError(
                "'train_on_prompt' and 'mask_history' are both true: one makes every turn a target, the other only the "
                "last answer; keep one"
            )
        if self.eval_dataset and self.val_size:
            raise ValueError(
                f"'eval_dataset' and 'val_size' {self.val_size} are both given; keep the one that says where the "
                "validation rows come from"
            )
        return self


class LlmTraining(Section):
    """`training`."""

    output_dir: str = Field(description="run folder: checkpoints, metrics.jsonl, exported weights. Required")
    stage: Annotated[str, one_of(("sft", "pt"))] = Field("sft", description="pt: rows are plain text; all is trained")
    per_device_train_batch_size: Count = Field(1, description="rows that one rank takes at once")
    gradient_accumulation_steps: Count | None = Field(
        None, description="micro-batches of a rank in one optimizer step; null = 1"
    )
    optimizer: Annotated[str, one_of(("adamw", "muon"))] = Field("adamw", description="optimizer")
    lr: AtLeast0 = Field(1e-5, description="highest learning rate")
    weight_decay: AtLeast0 = Field(0.01, description="weight decay, on parameters of two dimensions and more")
    adam_beta1: FractionBelow1 = Field(0.9, description="decay of the first moment")
    adam_beta2: FractionBelow1 = Field(0.95, description="decay of the second moment")
    adam_epsilon: Above0 = Field(1e-8, description="added to the root of the second moment")
    max_grad_norm: AtLeast0 = Field(1.0, description="highest L2 norm of the gradient; 0 = measure only")
    lr_scheduler_type: Annotated[str, one_of(("cosine", "linear", "constant"))] = Field("cosine", description="decay")
    warmup_ratio: FractionBelow1 = Field(0.0, description="warmup, as a share of all steps")
    min_lr: AtLeast0 | None = Field(None, description="cosine: lowest learning rate; null = 1e-6, at most lr")
    num_train_epochs: Above0 = Field(3.0, description="passes over the data, fractions allowed")
    max_steps: StepCount = Field(None, description="optimizer steps in all, in place of num_train_epochs; -1 = none")
    disable_shuffling: Bool = Field(False, description="rows in the order of the files")
    seed: Size = Field(42, description="seed of weights, data order and dropout")
    save_steps: StepCount = Field(500, description="steps between two checkpoints; -1 = none")
    save_epochs: StepCount = Field(1, description="epochs between two checkpoints, if they have an end; -1 = none")
    save_total_limit: Count | None = Field(3, description="newest checkpoints that are kept; null = all")
    save_best: str | None = Field(
        None, description="ours: loss: after each evaluation with the best one so far, save a checkpoint that stays"
    )
    early_stop: Count | None = Field(
        None, description="ours: evaluations in a row without a better value that end the run; null = none"
    )
    eval_generate: str | None = Field(
        None, description="ours: score of the answers to validation rows that each evaluation generates; null = none"
    )
    eval_generate_language: str | None = Field(
        None, description="ours: language of the transcripts that wer compares; null = as in any language"
    )
    eval_generate_rows: Count = Field(64, description="ours: the first so many validation rows are answered")
    eval_generate_batch_size: Count = Field(8, description="ours: rows that a process answers at a time")
    eval_max_new_tokens: Count = Field(128, description="ours: longest answer of an evaluation in tokens")
    save_only_model: Bool = Field(False, description="leave optimizer and random states out of checkpoints")
    save_async: Bool = Field(False, description="write checkpoints in the background")
    save_hf_weights: Bool = Field(True, description="export a HF directory at the end")
    resume_from_checkpoint: str | None = Field(None, description="run folder or checkpoint to go on from")
    logging_steps: Count = Field(1, description="steps between two log lines")
    log_format: Annotated[str, one_of(("auto", "full", "short", "live"))] = Field(
        "auto", description="ours: form of the log lines, see --log-format"
    )
    report_to: Texts = Field(
        None,
        description="ours: trackers that get the figures, by name, see --report-to",
    )
    run_project: str | None = Field(None, description="ours: project that holds the run in trackers")
    run_name: str | None = Field(None, description="ours: name of the run in trackers")
    run_tags: Texts = Field(None, description="ours: tags of the run in trackers")
    calculate_per_token_loss: Bool = Field(
        False, description="true = sum over all targets of a step ÷ their number; false = mean of micro-batches' means"
    )
    dataloader_num_workers: Size = Field(0, description="processes that prepare batches")
    dataloader_prefetch_factor: Count | None = Field(None, description="micro-batches each prepares in advance")
    dataloader_pin_memory: Bool = Field(True, description="batches in pinned host memory")
    dataloader_persistent_workers: Bool = Field(False, description="they are kept from epoch to epoch")
    dataloader_drop_last: Bool = Field(False, description="leave out the rows that don't fill a global batch")
    profile: Bool = Field(False, description="profile this run")
    profile_step_start: Size = Field(0, description="first step recorded")
    profile_step_end: Int = Field(-1, description="recording ends before this step; -1 = with the run")
    profile_ranks: Ranks = Field([-1], description="ranks that record; [-1] = all")
    profile_level: Annotated[str, one_of(("level0", "level1", "level2"))] = Field(
        "level0", description="detail of NPU traces"
    )
    profile_export_type: Annotated[str, one_of(("text", "db"))] = Field("text", description="no effect: text")
    profile_data_simplification: Bool = Field(False, description="NPU: keep only the parsed data")
    profile_with_cpu: Bool = Field(False, description="record the host's side too")
    profile_with_stack: Bool = Field(False, description="record call stacks")
    profile_with_memory: Bool = Field(False, description="record memory")
    profile_record_shapes: Bool = Field(False, description="record tensor shapes")
    profile_save_path: str = Field("./profile", description="folder of the traces")
    use_flash_attn: Bool = Field(False, description="no effect: transformers chooses the kernel")
    use_fused_rmsnorm: Bool = Field(False, description="--use-fused-rmsnorm")
    use_fused_rotary_pos_emb: Bool = Field(False, description="--use-fused-rotary-pos-emb")
    moe_grouped_gemm: Bool = Field(False, description="no effect: transformers' own kernels")
    chunk_loss_size: Count | None = Field(None, description="tokens whose logits are held at once; null = all")
    fix_router: Bool = Field(False, description="experts chosen without regard to the tokens: refused")

    @model_validator(mode="after")
    def _agree(self) -> LlmTraining:
        if self.min_lr is not None and self.min_lr > self.lr and self.lr_scheduler_type == "cosine":
            raise ValueError(f"'min_lr' {self.min_lr:g} is greater than 'lr' {self.lr:g}")
        if self.profile and self.profile_step_end != -1 and self.profile_step_end <= self.profile_step_start:
            raise ValueError(
                f"'profile_step_end' {self.profile_step_end} must be greater than 'profile_step_start' "
                f"{self.profile_step_start}; -1 means the run's end"
            )
        return self


class LlmInference(Section):
    """`inference`: of the script that answers prompts."""

    infer_backend: str = Field("huggingface", description="no effect in training")
    max_new_tokens: Count = Field(512, description="no effect in training")
    do_sample: Bool = Field(False, description="no effect in training")


class LlmConfig(Section):
    """A whole file."""

    model: LlmModel = Field(description="which model is trained. Required")
    parallel: LlmParallel = Field(description="how it is sharded. Required")
    data: LlmData = Field(description="on what. Required")
    training: LlmTraining = Field(description="how. Required")
    inference: LlmInference | None = Field(None, description="no effect in training")
