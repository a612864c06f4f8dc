"""`model.json` of `pretrain_vlm.py` on the Megatron backend: the model's numbers, what is frozen, layers of each stage.

A HF directory (`init_from_hf_path`) gives the structure, and then the numbers here must be its own; without one the
numbers alone describe a Qwen2.5-VL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from mindspeed_mm.configs.model_config import FamilyName, LossConfig, Plugins, check_ignored_weights, freeze_answer
from mindspeed_mm.configs.published import log_no_effect, published_paths, refusals
from mindspeed_mm.configs.scalars import read_int, show
from mindspeed_mm.configs.sections import (
    Bool,
    Count,
    Float,
    Section,
    Size,
    key_paths,
    plain,
    raise_all,
    sort_keys,
    unknown_key_problems,
    validate_section,
)
from mindspeed_mm.configs.vlm_rules import IDLE_VLM_KEYS, REFUSED_VLM_KEYS
from mindspeed_mm.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ModelPart = Literal["vision_encoder", "vision_projector", "text_decoder"]
PART_PATHS: dict[ModelPart, str] = {
    "vision_encoder": "image_encoder.vision_encoder",
    "vision_projector": "image_encoder.vision_projector",
    "text_decoder": "text_decoder",
}


def _read_layers(value: object) -> list[int] | list[list[int]] | None:
    """Read `[11, 17]`, or `[[5, 5], [9, 9]]` with a list for each virtual stage."""
    if value is None:
        return None
    nested = isinstance(value, list) and bool(value) and all(isinstance(row, list) and row for row in value)
    try:
        if not isinstance(value, list) or not value:
            raise ValueError
        rows = [[read_int(number) for number in row] for row in (value if nested else [value])]
        if any(number < 0 for row in rows for number in row):
            raise ValueError
    except ValueError:
        raise ValueError(
            "expected layers of each pipeline stage, such as [11, 17], or a list of such lists, one for each virtual "
            "stage"
        ) from None
    return rows if nested else rows[0]


PipelineLayers = Annotated[list[int] | list[list[int]] | None, BeforeValidator(_read_layers)]


class PartBlock(Section):
    """One part of the model."""

    freeze: Bool | None = Field(None, description="true = its parameters stay as they are")
    pipeline_num_layers: PipelineLayers = Field(
        None, description="layers of each pipeline stage; with virtual stages a list for each of these"
    )


class RecomputedBlock(PartBlock):
    """A part whose recompute settings take precedence over the flags'."""

    recompute_granularity: Literal["full", "selective"] | None = Field(
        None, description="takes precedence over --recompute-granularity in this part, with the next two keys"
    )
    recompute_method: Literal["uniform", "block"] | None = Field(None, description="as --recompute-method")
    recompute_num_layers: Count | None = Field(None, description="as --recompute-num-layers")
    activation_offload: Bool = Field(
        False,
        description="what the layers of this part keep for backward waits for it in host memory; of layers that are "
        "recomputed whole there is nothing to wait",
    )

    @model_validator(mode="after")
    def _recompute_fits(self) -> RecomputedBlock:
        if self.recompute_granularity == "selective" and (self.recompute_method or self.recompute_num_layers):
            raise ValueError("recompute_method and recompute_num_layers belong to recompute_granularity full")
        if self.recompute_granularity == "full" and self.recompute_method is None:
            raise ValueError("recompute_granularity full needs recompute_method, uniform or block")
        if self.recompute_method == "block" and self.recompute_num_layers is None:
            raise ValueError("recompute_method block needs recompute_num_layers")
        return self


class VLMVisionEncoderBlock(RecomputedBlock):
    """`image_encoder.vision_encoder`."""

    num_layers: Count | None = Field(None, description="layers")
    hidden_size: Count | None = Field(None, description="hidden size")
    ffn_hidden_size: Count | None = Field(None, description="hidden size of the MLP")
    intermediate_size: Count | None = Field(None, description="the same; ffn_hidden_size takes precedence")
    num_attention_heads: Count | None = Field(None, description="attention heads")
    num_query_groups: Count | None = Field(None, description="key-value heads: as many as attention heads")
    kv_channels: Count | None = Field(None, description="size of a head")
    in_channels: Count | None = Field(None, description="colours; 3 without a HF directory")
    patch_size: Count | None = Field(None, description="pixels of a patch's side; 14 without a HF directory")
    spatial_merge_size: Count | None = Field(None, description="patches of a token's side; 2 without a HF directory")
    temporal_patch_size: Count | None = Field(None, description="frames of a patch; 2 without a HF directory")
    tokens_per_second: Count | None = Field(None, description="time steps of a second; 2 without a HF directory")
    window_attn_size: Count | None = Field(None, description="pixels of a window's side; 112 without a HF directory")
    fullatt_block_indexes: list[Size] | None = Field(
        None, description="layers that see the whole image; 7, 15, 23, 31 without a HF directory"
    )
    out_hidden_size: Count | None = Field(None, description="hidden size of the language model")
    layernorm_epsilon: Float | None = Field(None, description="epsilon of the norms: 1e-6")


class VisionProjector(PartBlock):
    """`image_encoder.vision_projector`."""

    num_layers: Count | None = Field(None, description="1")
    input_size: Count | None = Field(None, description="hidden size of the tower")
    ffn_hidden_size: Count | None = Field(None, description="that of a token's patches together")
    hidden_size: Count | None = Field(None, description="hidden size of the language model")
    layernorm_epsilon: Float | None = Field(None, description="epsilon of its norm: 1e-6")


class VLMImageEncoderBlock(Section):
    """`image_encoder`."""

    vision_encoder: VLMVisionEncoderBlock = Field(
        VLMVisionEncoderBlock(), description="vision tower; frozen unless freeze is false"
    )
    vision_projector: VisionProjector = Field(
        VisionProjector(), description="what joins the tower to the language model; trained unless freeze is true"
    )


class TextDecoder(RecomputedBlock):
    """`text_decoder`."""

    num_layers: Count | None = Field(None, description="layers")
    hidden_size: Count | None = Field(None, description="hidden size")
    ffn_hidden_size: Count | None = Field(None, description="hidden size of the MLP")
    num_attention_heads: Count | None = Field(None, description="attention heads")
    group_query_attention: Bool | None = Field(None, description="false: as many key-value heads as attention heads")
    num_query_groups: Count | None = Field(None, description="key-value heads")
    kv_channels: Count | None = Field(None, description="size of a head")
    vocab_size: Count | None = Field(None, description="rows of the embedding")
    max_position_embeddings: Count | None = Field(None, description="longest sequence of the model")
    rope_theta: Float | None = Field(None, description="base of rotary positions; 1e6 without a HF directory")
    rotary_base: Float | None = Field(None, description="the same; rope_theta takes precedence")
    mrope_section: list[Count] | None = Field(
        None, description="rotary pairs for time, height and width; 16, 24, 24 without a HF directory"
    )
    layernorm_epsilon: Float | None = Field(None, description="epsilon of the norms")
    untie_embeddings_and_output_weights: Bool | None = Field(None, description="embedding and head are two weights")
    add_qkv_bias: Bool | None = Field(None, description="bias in q, k, v, as the family has it")
    qk_layernorm: Bool | None = Field(None, description="normalised q and k, as the family has it")
    use_qk_norm: Bool | None = Field(None, description="the same")
    attention_dropout: Annotated[Float, Field(ge=0, lt=1)] | None = Field(None, description="dropout of attention")
    init_method_std: Annotated[Float, Field(gt=0)] | None = Field(None, description="deviation of random weights")


_FREEZE: dict[ModelPart, tuple[tuple[str, ...], bool]] = {
    "vision_encoder": (("image_encoder.vision_encoder.freeze", "freeze_vision_model"), True),
    "vision_projector": (("image_encoder.vision_projector.freeze", "freeze_vision_projection"), False),
    "text_decoder": (("text_decoder.freeze", "freeze_language_model"), False),
}


class VLMModelConfig(Section):
    """model.json on the Megatron backend, typed. With `init_from_hf_path` the numbers may be left out; what they say
    must be what its config.json says.
    """

    model_id: FamilyName = Field(None, description="qwen2_5_vl (or qwen2_5vl), or the HF directory's model_type")
    init_from_hf_path: str | None = Field(
        None, description="HF directory: config, weights. Absent = the numbers below describe a Qwen2.5-VL"
    )
    train_from_scratch: Bool = Field(
        False,
        description="random weights where --load brings none; the directory holds none, or ignore_weights is true",
    )
    ignore_weights: Bool = Field(
        False, description="with train_from_scratch: the weights that the directory holds stay unread on purpose"
    )
    trust_remote_code: Bool = Field(False, description="the same as --trust-remote-code, for the whole run")
    plugin: Plugins = Field([], description="modules imported first; they may register models")
    img_context_token_id: Size | None = Field(None, description="token that stands for a part of an image")
    video_token_id: Size | None = Field(None, description="token that stands for a part of a video")
    vision_start_token_id: Size | None = Field(None, description="token before an image or a video")
    image_encoder: VLMImageEncoderBlock = Field(VLMImageEncoderBlock(), description="vision tower and projector")
    text_decoder: TextDecoder = Field(TextDecoder(), description="language model; trained unless freeze is true")
    freeze_vision_model: Bool | None = Field(None, description="the same as image_encoder.vision_encoder.freeze")
    freeze_vision_projection: Bool | None = Field(None, description="the same as image_encoder.vision_projector.freeze")
    freeze_language_model: Bool | None = Field(None, description="the same as text_decoder.freeze")
    loss_cfg: LossConfig = Field(LossConfig(), description="loss")

    _file: str = PrivateAttr("model.json")

    @model_validator(mode="after")
    def _one_answer_each(self) -> VLMModelConfig:
        check_ignored_weights(self.train_from_scratch, self.ignore_weights)
        for paths, _ in _FREEZE.values():
            freeze_answer(self, paths)
        return self

    @property
    def file(self) -> str:
        """The file's name, for messages."""
        return self._file

    @property
    def freeze_vision_encoder(self) -> bool:
        """Whether the vision tower is frozen; by default it is."""
        return self._freezes("vision_encoder")

    @property
    def freeze_vision_projector(self) -> bool:
        """Whether the projector is frozen; by default it isn't."""
        return self._freezes("vision_projector")

    @property
    def freeze_text_decoder(self) -> bool:
        """Whether the language model is frozen; by default it isn't."""
        return self._freezes("text_decoder")

    def _freezes(self, part: ModelPart) -> bool:
        paths, default = _FREEZE[part]
        given = freeze_answer(self, paths)
        return default if given is None else given

    def default_freezes(self) -> dict[ModelPart, bool]:
        """Return part → whether it is frozen, for the parts that model.json neither freezes nor trains."""
        return {part: default for part, (paths, default) in _FREEZE.items() if freeze_answer(self, paths) is None}

    def value(self, path: str) -> Any:
        """Return the value of the key at a dotted path, None where it is absent."""
        found: Any = self
        for name in path.split("."):
            found = getattr(found, name)
        return found

    def tower_numbers(self) -> dict[str, Any]:
        """Return the given numbers of the vision tower's structure: dotted key → value."""
        path, block = PART_PATHS["vision_encoder"], self.image_encoder.vision_encoder
        names = [name for name in VLMVisionEncoderBlock.model_fields if name not in RecomputedBlock.model_fields]
        return {f"{path}.{name}": value for name in names if (value := getattr(block, name)) is not None}

    def pipeline_layers(self, part: ModelPart) -> list[list[int]] | None:
        """Return a part's layers as [virtual stage][pipeline rank] (one row without virtual stages), or None."""
        given = self.value(f"{PART_PATHS[part]}.pipeline_num_layers")
        if given is None:
            return None
        return [list(row) for row in (given if isinstance(given[0], list) else [given])]

    def recompute_of(self, part: Literal["vision_encoder", "text_decoder"]) -> dict[str, Any]:
        """Return the recompute settings of a part that take precedence over the flags'.

        `recompute_granularity` comes with the other two, None where they are absent, so that nothing of the flags' is
        left; without it only what is given.
        """
        block = self.value(PART_PATHS[part])
        names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        settings = {name: getattr(block, name) for name in names}
        if settings["recompute_granularity"] is None:
            return {name: value for name, value in settings.items() if value is not None}
        return settings

    def hf_config(self) -> PretrainedConfig:
        """Return transformers' configuration of the model.

        Raises:
            ConfigError: the directory's config.json can't be read or says other numbers than this file, or, without a
                directory, numbers are missing or don't fit each other.
        """
        from mindspeed_mm.configs.vlm_structure import structure_of  # imports transformers when it is called

        return structure_of(self)

    @classmethod
    def from_dict(cls, mapping: object, file: str | None = None) -> VLMModelConfig:
        """Type the content of model.json, and log which published keys have no effect here.

        Args:
            mapping: ConfigReader or dict.
            file: name to use in messages.

        Raises:
            ConfigError: unknown keys, wrong values, things that are not there yet.
        """
        if isinstance(mapping, cls):
            return mapping
        file = file or getattr(mapping, "config_file", None) or "model.json"
        data = plain(mapping)
        if not isinstance(data, dict):
            raise ConfigError(f"{file}: found {show(data)}, expected an object with keys such as model_id")
        published = published_paths("model")
        keys = sort_keys(cls, data, published)
        problems = unknown_key_problems("model", file, keys.unknown, key_paths(cls), published)
        problems += refusals({**data, **keys.published, **_loss_values(data)}, REFUSED_VLM_KEYS, file)
        config, faults = validate_section(cls, keys.typed, file)
        raise_all(problems + faults)
        assert config is not None
        log_no_effect([p for p, v in keys.published.items() if v is not None], IDLE_VLM_KEYS, file)
        config._file = file
        return config


def _loss_values(data: dict[str, Any]) -> dict[str, Any]:
    loss = data.get("loss_cfg")
    return {f"loss_cfg.{key}": value for key, value in loss.items()} if isinstance(loss, dict) else {}


def check_pipeline_layers(
    config: VLMModelConfig, pipeline: int, virtual: int | None, vision_layers: int | None, text_layers: int
) -> list[str]:
    """Return what doesn't fit in the lists of layers of each stage.

    Args:
        config: model.json.
        pipeline, virtual: parallel sizes; virtual is None without interleaving.
        vision_layers, text_layers: numbers of layers in the whole model; vision_layers is None without a tower.
    """
    totals: dict[ModelPart, int] = {"text_decoder": text_layers}
    if vision_layers is not None:
        totals |= {"vision_encoder": vision_layers, "vision_projector": 1}
    problems: list[str] = []
    counts: dict[ModelPart, list[int]] = {}
    for part, total in totals.items():
        lists = config.pipeline_layers(part)
        if lists is None:
            continue
        key = f"{config.file}: '{PART_PATHS[part]}.pipeline_num_layers'"
        problem = _shape_problem(config.value(f"{PART_PATHS[part]}.pipeline_num_layers"), lists, pipeline, virtual)
        flat = [number for row in lists for number in row]
        if not problem and sum(flat) != total:
            problem = f"adds up to {sum(flat)}; the model has {total} {'layer' if total == 1 else 'layers'} there"
        if problem:
            problems.append(f"{key} {problem}")
        else:
            counts[part] = flat
    if not problems and "text_decoder" in counts:
        problems += _order_problems(config.file, counts, vision_layers)
    return problems


def _shape_problem(given: list[Any], lists: Sequence[Sequence[int]], pipeline: int, virtual: int | None) -> str:
    nested = isinstance(given[0], list)
    if virtual is None and nested and len(lists) > 1:
        return (
            f"is a list of {len(lists)} lists; that is for virtual stages, and "
            f"--virtual-pipeline-model-parallel-size is absent: write one list of {pipeline} numbers, or give the flag "
            f"as {len(lists)}"
        )
    if virtual is not None and not nested:
        return (
            f"is one list; with --virtual-pipeline-model-parallel-size {virtual} write {virtual} lists of {pipeline} "
            "numbers each, [[virtual stage 0], [virtual stage 1], …]"
        )
    if len(lists) != (virtual or 1):
        return f"has {len(lists)} lists; --virtual-pipeline-model-parallel-size is {virtual}"
    wrong = next((row for row in lists if len(row) != pipeline), None)
    if wrong is not None:
        numbers = f"{len(wrong)} number{'s' if len(wrong) > 1 else ''}"
        return f"has {numbers} ({list(wrong)}); --pipeline-model-parallel-size is {pipeline}, and each stage needs one"
    return ""


def _order_problems(file: str, counts: dict[ModelPart, list[int]], vision_layers: int | None) -> list[str]:
    """Vision tower, projector and language layers follow each other in the order of stages."""
    if vision_layers is None:
        return []
    first_text = next(i for i, number in enumerate(counts["text_decoder"]) if number)
    vision = counts.get("vision_encoder")
    last_vision = max((i for i, number in enumerate(vision) if number), default=0) if vision else 0
    projector = counts["vision_projector"].index(1) if "vision_projector" in counts else last_vision
    for what, stage in (("vision layers", last_vision), ("the projector", projector)):
        if stage > first_text:
            return [
                f"{file}: 'pipeline_num_layers' puts {what} on stage {stage}, after the first language layers on stage "
                f"{first_text} (counted from 0 in a micro-batch's order); move them to stage {first_text} or before"
            ]
    if projector < last_vision:
        return [
            f"{file}: 'pipeline_num_layers' puts the projector on stage {projector}, before the last vision layers on "
            f"stage {last_vision}; move it to stage {last_vision} or after"
        ]
    return []
