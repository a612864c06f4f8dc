"""VLModel: a pipeline stage of a multimodal model, built of Megatron-core's modules, with its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import nn

from mindspeed_mm.configs.lora import LoraOptions
from mindspeed_mm.configs.vlm_config import PART_PATHS, VLMModelConfig
from mindspeed_mm.models.common.adapters import AdapterPlan
from mindspeed_mm.models.common.build_context import current_build_context
from mindspeed_mm.models.common.families import require_megatron_form
from mindspeed_mm.models.common.family import freeze_parts, require_packed_positions
from mindspeed_mm.models.common.first_weights import check_first_weights
from mindspeed_mm.models.common.idle_tower import ZeroContribution
from mindspeed_mm.models.common.loss import LossOptions, LossOutput, Targets, finish_loss, targets_of_batch
from mindspeed_mm.models.common.megatron_names import ParamMapping
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.common.packed import run_lengths, take_documents
from mindspeed_mm.models.megatron.adapters import add_adapters, plan_megatron_adapters, track_dropout
from mindspeed_mm.models.megatron.family import MegatronFamily, Towers
from mindspeed_mm.models.megatron.layers import SampleLengths, with_gradient
from mindspeed_mm.models.megatron.memory import offload_layers
from mindspeed_mm.models.megatron.text_decoder.gpt import LanguageModel, build_language_model, language_config
from mindspeed_mm.models.megatron.text_decoder.names import DecoderShape
from mindspeed_mm.models.transformers.inferred import traits_of
from mindspeed_mm.models.transformers.meta_model import build_meta_model
from mindspeed_mm.parallel.pipeline import Stage, needs_variable_shapes, plan_stages
from mindspeed_mm.parallel.sizes import ParallelSizes
from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.labels import IGNORE_INDEX
from mindspeed_mm.utils.log import info_rank0

_MEDIA = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))


def planned_stages(
    described: VLMModelConfig, hf_config: Any, family: MegatronFamily, pipeline: int, virtual: int | None
) -> list[Stage]:
    """Return each pipeline stage's part of a model.

    Args:
        described: content of model.json.
        hf_config: transformers' configuration of the whole model.
        family: the Megatron-core form of the model's family.
        pipeline: pipeline-parallel size.
        virtual: virtual pipeline size; None: no interleaving.

    Raises:
        ConfigError: the layer lists don't fit the sizes.
    """
    return plan_stages(
        pipeline,
        virtual,
        text_layers=hf_config.get_text_config().num_hidden_layers,
        vision_layers=family.structure.count_tower_layers(hf_config),
        text=described.pipeline_layers("text_decoder"),
        vision=described.pipeline_layers("vision_encoder"),
        projector=described.pipeline_layers("vision_projector"),
    )


def planned_meta_model(
    described: VLMModelConfig, pipeline: int, virtual: int | None, lora: LoraOptions | None
) -> tuple[nn.Module, list[Stage]]:
    """Return the transformers model on meta, frozen as model.json and `lora` state, and its pipeline stages.

    Raises:
        ConfigError: the model has no Megatron-core form, the layer lists don't fit the sizes, or a layer of `lora`
            gets no adapter.
    """
    hf_config = described.hf_config()
    stages = planned_stages(described, hf_config, require_megatron_form(hf_config.model_type), pipeline, virtual)
    model = build_meta_model(ModelHub.get(None, hf_config), hf_config)
    freeze_parts(model, traits_of(model), frozen_parts(described))
    if lora is not None:
        plan_megatron_adapters(model, lora)
    return model, stages


def frozen_parts(described: VLMModelConfig) -> dict[str, bool]:
    """Return for each part whether model.json freezes it."""
    return {
        "vision_encoder": described.freeze_vision_encoder,
        "vision_projector": described.freeze_vision_projector,
        "text_decoder": described.freeze_text_decoder,
    }


class VLModel(MegatronModule):
    """A pipeline stage's part of vision tower, projector and language model.

    Every stage receives the whole micro-batch; the hidden states of the previous stage are set by `set_input_tensor`.

    Attributes:
        config: Megatron-core's configuration of the whole language model; the schedule reads it.
        image_encoder, text_decoder: the stage's parts; None: the stage has no such part.
        stage: the stage's layers and parts.
        loss_options: `loss_cfg` of model.json.
        source: the HF directory of the model; exports take configuration, tokenizer and dtypes from it.
        pending_weights: the HF directory that the weights are loaded from; None: they are drawn at random.
        seq_length: the length that rows are padded to; None: rows are padded as sequence parallelism requires.
        adapter_plan: what of the whole model has adapters; None: nothing.
    """

    image_encoder: Any
    text_decoder: LanguageModel | None
    source: str | None = None
    source_dtype: torch.dtype | None = None
    pending_weights: str | None = None
    seq_length: int | None = None
    adapter_plan: AdapterPlan | None = None
    expected_factor: Callable[[int], float | torch.Tensor] | None = None
    """In float16: number of target tokens of a micro-batch → approximate gradient of its summed loss in backward."""

    def __init__(
        self,
        hf_config: Any,
        family: MegatronFamily,
        sizes: ParallelSizes,
        stage: Stage,
        meta_model: Any,
        *,
        loss_options: LossOptions | None = None,
        vision_recompute: Mapping[str, Any] | None = None,
        text_recompute: Mapping[str, Any] | None = None,
        loss_group: Any = None,
        vp_stage: int | None = None,
    ) -> None:
        """
        Args:
            hf_config: transformers' configuration of the whole model.
            family: the Megatron-core form of the model's family.
            sizes: the parallel layout.
            stage: the stage's layers and parts.
            meta_model: the transformers model on meta, which computes position ids.
            loss_options: `loss_cfg` of model.json.
            vision_recompute, text_recompute: recompute settings of one part; they override those of `sizes`.
            loss_group: data-parallel group, for token_loss.
            vp_stage: number of the chunk on this pipeline rank; None: no interleaving.
        """
        text_config = hf_config.get_text_config()
        super().__init__(config=language_config(text_config, sizes, family.structure))
        self.towers: Towers | None = family.loaded_towers
        self.hf_config, self.family, self.sizes, self.stage, self.vp_stage = hf_config, family, sizes, stage, vp_stage
        self.loss_options = loss_options or LossOptions()
        self._meta_model = (meta_model,)  # a tuple, so that it isn't registered as a submodule
        self._loss_group = loss_group
        self._input: torch.Tensor | None = None
        self.pre_process = stage.has_embedding
        self.post_process = stage.has_head
        # as in transformers, since the configurations of the model and of its text model may differ
        self.share_embeddings_and_output_weights = (
            meta_model.get_output_embeddings().weight is meta_model.get_input_embeddings().weight
        )
        self.image_encoder = None
        if stage.has_vision:
            assert self.towers is not None
            self.image_encoder = self.towers.image_encoder(
                hf_config.vision_config,
                replace(sizes, recompute={**sizes.recompute, **(vision_recompute or {})}),
                layers=stage.vision_layers,
                has_patch_embedding=stage.has_patch_embedding,
                has_projector=stage.has_projector,
            )
        self.text_decoder = None
        if stage.has_text:
            self.text_decoder = build_language_model(
                text_config,
                replace(sizes, recompute={**sizes.recompute, **(text_recompute or {})}),
                family,
                tied=self.share_embeddings_and_output_weights,
                layers=stage.text_layers,
                pre_process=stage.has_embedding,
                post_process=stage.has_head,
            )
        self._shape = DecoderShape(text_config.num_key_value_heads, sizes.tensor)
        self._of_adapters: dict[str, ParamMapping] = {}

    @classmethod
    def from_config(cls, config: Any, vp_stage: int | None = None) -> VLModel:
        """Build a stage on meta from model.json and the run's layout (the current BuildContext).

        Args:
            config: model.json's content.
            vp_stage: number of the chunk on this pipeline rank; None: no interleaving.

        Raises:
            ConfigError: the model has no Megatron-core form, or the layer lists don't fit the sizes.
        """
        context = current_build_context()
        sizes = context.sizes or ParallelSizes()
        described = VLMModelConfig.from_dict(config)
        hf_config = described.hf_config()
        family = require_megatron_form(hf_config.model_type)
        if not vp_stage:
            check_first_weights(
                cls.__name__,
                described.init_from_hf_path,
                from_scratch=described.train_from_scratch,
                ignores=described.ignore_weights,
                file=described.file,
                keys=(
                    "init_from_hf_path",
                    "'init_from_hf_path' (a HF directory) or --load (a checkpoint that is there)",
                ),
            )
        stages = planned_stages(described, hf_config, family, sizes.pipeline, sizes.virtual_pipeline)
        if needs_variable_shapes(stages):
            sizes = replace(sizes, variable_seq_lengths=True)
        with torch.device("meta"):
            model = cls(
                hf_config,
                family,
                sizes,
                stages[(vp_stage or 0) * sizes.pipeline + context.pipeline_rank],
                build_meta_model(ModelHub.get(None, hf_config), hf_config),
                loss_options=LossOptions.of(context.loss, described.loss_cfg),
                vision_recompute=described.recompute_of("vision_encoder"),
                text_recompute=described.recompute_of("text_decoder"),
                loss_group=context.loss_group,
                vp_stage=vp_stage,
            )
        for part, path in ((model.image_encoder, "image_encoder.vision_encoder"), (model.text_decoder, "text_decoder")):
            if part is not None and described.value(f"{path}.activation_offload"):
                offload_layers(part, f"{described.file}: {path}.activation_offload")
        model.source = described.init_from_hf_path
        model.source_dtype = getattr(hf_config, "dtype", None)
        model.pending_weights = None if described.train_from_scratch else described.init_from_hf_path
        if sizes.pipeline > 1 and not sizes.variable_seq_lengths:
            model.seq_length = context.seq_length
            if model.seq_length is None:
                raise ConfigError(
                    "--seq-length is missing: pipeline stages exchange tensors of that length, and rows are padded to "
                    "it; give it, or add --variable-seq-lengths"
                )
        if family.towers is not None and not vp_stage:
            _tell_default_freezes(described)
        model.freeze(**frozen_parts(described))
        if context.lora is not None:
            model.add_adapters(context.lora)
            track_dropout(context.seed)
        return model

    def freeze(self, *, vision_encoder: bool, vision_projector: bool, text_decoder: bool) -> None:
        """Freeze or unfreeze parts, in this stage and in the meta model."""
        if self.image_encoder is not None:
            self.image_encoder.vision_encoder.requires_grad_(not vision_encoder)
            if self.image_encoder.vision_projector is not None:
                self.image_encoder.vision_projector.requires_grad_(not vision_projector)
        if self.text_decoder is not None:
            self.text_decoder.requires_grad_(not text_decoder)
        frozen = {"vision_encoder": vision_encoder, "vision_projector": vision_projector, "text_decoder": text_decoder}
        freeze_parts(self.meta_model(), traits_of(self.meta_model()), frozen)

    def add_adapters(self, options: LoraOptions) -> None:
        """Insert adapters into this stage and the meta model, and freeze all other weights.

        Raises:
            ConfigError: see `plan_adapters`; or a layer gets no adapter on this backend.
        """
        self.adapter_plan = plan_megatron_adapters(self.meta_model(), options)
        self._of_adapters = add_adapters(self, self.param_mapping, self.meta_model(), options)

    def modalities_of(self, name: str) -> tuple[str, ...]:
        """Return the modalities of a tower's parameter; () for parameters of the language model.

        Args:
            name: name in this chunk.
        """
        return ("image", "video") if name.startswith("image_encoder.") else ()

    def meta_model(self) -> Any:
        """Return the whole transformers model on meta."""
        return self._meta_model[0]

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the previous stage's output: [sequence, batch, hidden], or hidden states of the vision tower."""
        self._input = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """Return the embedding's weight on the stage that has it, and the head's on the last one."""
        return None if self.text_decoder is None else self.text_decoder.shared_embedding_or_output_weight()

    def param_mapping(self, name: str) -> ParamMapping:
        """Return the transformers tensors that a parameter consists of.

        Args:
            name: name in this chunk.
        """
        if name in self._of_adapters:
            return self._of_adapters[name]
        part, inner = name.split(".", 1)
        if part == "image_encoder":
            return self.image_encoder.param_mapping(inner)
        if inner.startswith("decoder.layers."):
            number, rest = inner.removeprefix("decoder.layers.").split(".", 1)
            inner = f"decoder.layers.{int(number) + self.stage.text_layers.start}.{rest}"
        mapping = self.family.param_mapping(inner, self._shape)
        if mapping.sources == (self.family.head,) and self.share_embeddings_and_output_weights:
            return self.family.param_mapping("embedding.word_embeddings.weight", self._shape)
        return mapping

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Prepare a collated micro-batch, on the host.

        Args:
            batch: input_ids, labels (or none), attention_mask or, for packed rows, documents [batch, sequence] (see
                `models/common/packed.py`), media tensors.

        Returns:
            the batch with padded rows and `position_ids`; with `targets` in place of labels, with `sample_lengths`, if
            its rows are packed, and of a model with a tower, `patch_layout` and `media_places` in place of grids.

        Raises:
            DataError: a row is longer than `seq_length` or not padded on the right, or `documents` is malformed.
            ConfigError: the rows are packed, and the model can't train on packed rows.
        """
        batch = dict(batch)
        documents = take_documents(batch)
        length, seq_length = batch["input_ids"].shape[1], self.seq_length
        mask = batch.get("attention_mask")
        if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise DataError("a row is padded on the left; the Megatron backend expects padding on the right")
        if seq_length is not None and length > seq_length:
            raise DataError(
                f"a row has {length} tokens, more than --seq-length {seq_length}; pipeline stages exchange tensors of "
                "that length: raise it, or add --variable-seq-lengths"
            )
        target = length if seq_length is None else seq_length
        if self.config.sequence_parallel:
            target = -(-target // self.sizes.tensor) * self.sizes.tensor
        positions = self._positions(batch, documents)
        for key, value in (("input_ids", 0), ("labels", IGNORE_INDEX), ("mm_token_type_ids", 0)):
            if batch.get(key) is not None and target > length:
                batch[key] = F.pad(batch[key], (0, target - length), value=value)
        if positions is None:
            rows = batch["input_ids"].shape[0]
            positions = torch.arange(target).expand(rows, -1)
            if self.config.mrope_section:
                positions = positions.expand(3, rows, -1)
        else:
            positions = F.pad(positions, (0, target - length))
        for key in ("attention_mask", "mm_token_type_ids"):
            batch.pop(key, None)  # rows and positions say what they do
        grids = {name: grid for _, name in _MEDIA if (grid := batch.pop(name, None)) is not None}
        batch["position_ids"] = positions
        if documents is not None:
            documents = F.pad(documents, (0, target - length))
            batch["sample_lengths"] = run_lengths(documents)
        if batch.get("labels") is not None:
            batch["targets"] = targets_of_batch(batch, self.loss_options.loss_type, documents)
            del batch["labels"]
        if self.towers is not None:
            batch["media_places"] = self._find_media_tokens(batch["input_ids"], grids)
            vision = self.hf_config.vision_config
            grid = torch.cat(list(grids.values())) if grids else self.towers.smallest_image(vision)[1]
            batch["patch_layout"] = self.towers.layout(grid, vision)
        return batch

    def check_packing(self) -> None:
        """Check, before a run begins, that the model can train on packed rows.

        Raises:
            ConfigError: it can't; the message names the key to change.
        """
        require_packed_positions(traits_of(self.meta_model()), type(self.meta_model()).__name__)

    def _positions(self, batch: dict[str, Any], documents: torch.Tensor | None) -> torch.Tensor | None:
        """Return position ids, [batch, sequence] or [3, batch, sequence]; None: consecutive positions."""
        meta_model = self.meta_model()
        if documents is None:
            return None if self.towers is None else self.towers.positions(meta_model, batch)
        positions = require_packed_positions(traits_of(meta_model), type(meta_model).__name__)(
            meta_model, batch, documents
        )
        return positions[1:] if positions.dim() == 3 else positions

    def _find_media_tokens(self, input_ids: torch.Tensor, grids: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the places of the placeholder tokens of images, then of videos, in the flattened rows: int64 [n].

        Raises:
            DataError: their number isn't that of the merged patches.
        """
        merge = self.hf_config.vision_config.spatial_merge_size**2
        found = []
        for (_, grid), token in zip(_MEDIA, (self.hf_config.image_token_id, self.hf_config.video_token_id)):
            found.append((input_ids.flatten() == token).nonzero().squeeze(1))
            expected = int(grids[grid].prod(1).sum()) // merge if grid in grids else 0
            if len(found[-1]) != expected:
                raise DataError(
                    f"a micro-batch has {len(found[-1])} tokens {token} for {expected} merged patches ({grid}); media "
                    "and placeholders of its rows don't belong together"
                )
        return torch.cat(found)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        targets: Targets | None = None,
        media_places: torch.Tensor | None = None,
        sample_lengths: list[list[int]] | None = None,
        patch_layout: Any = None,
        **media: Any,
    ) -> LossOutput | torch.Tensor | None:
        """Run the stage on a micro-batch from `prepare`.

        Args:
            input_ids, labels: [batch, sequence] int64.
            position_ids: [batch, sequence] or [3, batch, sequence] int64.
            targets: targets of the labels; None: logits are returned.
            media_places: [n] int64, the placeholder tokens of images, then of videos, in the flattened rows.
            sample_lengths: sample lengths of packed rows, padding included; None: each row is one sample.
            patch_layout: of the media's patches, or of one merged patch.
            media: pixel_values, pixel_values_videos, or none of them.

        Returns:
            on the last stage the loss, or logits [batch, sequence, vocabulary]; on others hidden states for the next.
        """
        received, self._input = self._input, None
        images = received if self.image_encoder is None else self._encode_images(media, patch_layout, received)
        if self.text_decoder is None:
            return images
        embeddings = None
        if self.stage.has_embedding:
            embeddings = self._embed(input_ids, images, media_places)
        else:
            self.text_decoder.set_input_tensor(received)
        packed = None if sample_lengths is None else SampleLengths(lengths=sample_lengths)
        hidden = self.text_decoder(input_ids, position_ids, None, decoder_input=embeddings, packed_seq_params=packed)
        if not self.stage.has_head:
            return hidden
        if targets is None:
            return self.text_decoder.logits(hidden)
        factor = None if self.expected_factor is None else self.expected_factor(len(targets.tokens))
        loss_sum = self.text_decoder.loss_sum(hidden, targets, self.loss_options, factor)
        return finish_loss(loss_sum, targets.denominator, self.loss_options.loss_type, self._loss_group)

    def _encode_images(
        self, media: Mapping[str, Any], layout: Any, received: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run the stage's part of tower and projector; without media, on one merged patch of zeros.

        A trained tower runs in every micro-batch, because gradients are reduced parameter by parameter. So does a tower
        that spans stages, because the next stage waits for its output.
        """
        found = [media[name] for name, _ in _MEDIA if media.get(name) is not None]
        pixels = torch.cat(found) if found else None
        if pixels is None:
            weights = list(self.image_encoder.parameters())
            trained = any(weight.requires_grad for weight in weights)
            if not trained and self.stage.has_patch_embedding and self.stage.has_embedding:
                return None
            assert self.towers is not None
            zeros = self.towers.smallest_image(self.hf_config.vision_config)[0]
            pixels = torch.zeros(zeros.shape, device=weights[0].device)
        if not self.stage.has_patch_embedding:
            self.image_encoder.set_input_tensor(received)
            pixels = None
        return self.image_encoder(pixels, layout)

    def _embed(
        self, input_ids: torch.Tensor, images: torch.Tensor | None, media_places: torch.Tensor | None
    ) -> torch.Tensor:
        """Return token embeddings with media in their places: [sequence, batch, hidden], or this rank's part of it."""
        assert self.text_decoder is not None
        hidden = self.text_decoder.embedding(input_ids=input_ids, position_ids=None)
        if images is not None and (media_places is None or not len(media_places)):
            hidden = ZeroContribution.apply(hidden, images) if images.requires_grad else hidden
        elif images is not None:
            rows = hidden.transpose(0, 1)
            filled = rows.flatten(0, 1).index_copy(0, media_places, images.squeeze(1).to(hidden.dtype))
            hidden = filled.view(rows.shape).transpose(0, 1)
        hidden = with_gradient(hidden.contiguous(), self.text_decoder.decoder)
        return tensor_parallel.scatter_to_sequence_parallel_region(hidden) if self.config.sequence_parallel else hidden


def _tell_default_freezes(described: VLMModelConfig) -> None:
    frozen = [PART_PATHS[part] for part, value in described.default_freezes().items() if value]
    if frozen:
        info_rank0(
            f"model.json says nothing of {' and '.join(f'{path}.freeze' for path in frozen)}: frozen, as published; "
            "write false to train"
        )
