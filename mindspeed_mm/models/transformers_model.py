"""TransformersModel: a transformers model built from model.json, with its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers  # noqa: F401 (here, so that loader workers forked before the model is built share it)
from transformers.utils import ModelOutput

from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.configs.hf_directory import read_hf_config
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.models.common.adapters import inject_adapters
from mindspeed_mm.models.common.boundaries import PackedRows, SampleBoundaries
from mindspeed_mm.models.common.build_context import current_build_context, fsdp2_config
from mindspeed_mm.models.common.document_attention import KEYWORD, LINEAR, DocumentAttention
from mindspeed_mm.models.common.exact_positions import ExactPositions
from mindspeed_mm.models.common.expert_load import ExpertLoad
from mindspeed_mm.models.common.family import (
    FamilyTraits,
    freeze_parts,
    require_causal_attention,
    require_packed_positions,
)
from mindspeed_mm.models.common.first_weights import check_first_weights, weight_files
from mindspeed_mm.models.common.head_loss import HeadLoss, cap_of_logits
from mindspeed_mm.models.common.host_inputs import HostInputs, keep_grids
from mindspeed_mm.models.common.idle_tower import IdleTowers
from mindspeed_mm.models.common.loss import (
    LossOptions,
    LossOutput,
    Targets,
    finish_loss,
    select_targets,
    targets_of_batch,
    weighted_sum,
)
from mindspeed_mm.models.common.media import split_media
from mindspeed_mm.models.common.modelzoo import ModelHub, likely_architecture
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.common.moe_loss import AddGradient, RouterLoss, SampleShares, chosen_coefficient
from mindspeed_mm.models.common.packed import documents_of_mask, row_documents, take_documents
from mindspeed_mm.models.common.paths import freeze_paths
from mindspeed_mm.models.common.placeholders import PLACES, KnownPlaces
from mindspeed_mm.models.common.sharding_outline import ShardingOutline
from mindspeed_mm.models.contract import as_shardable, as_trainable
from mindspeed_mm.models.transformers.attention import attend_in_towers, set_attention, why_by_masks
from mindspeed_mm.models.transformers.foreign import refuse_foreign_layout
from mindspeed_mm.models.transformers.inferred import traits_of
from mindspeed_mm.models.transformers.meta_model import config_for
from mindspeed_mm.models.transformers.tying import settle_tying
from mindspeed_mm.parallel.context import ContextParallel
from mindspeed_mm.parallel.sequence import SequenceShard
from mindspeed_mm.utils.errors import CheckpointError, ConfigError, DataError
from mindspeed_mm.utils.log import notice

_PARTS = ("vision_encoder", "vision_projector", "audio_encoder", "text_decoder")


class TransformersModel(MultiModalModule):
    """A model of the transformers library, trained without changes to its code.

    It is built from model.json's content: the HF directory `init_from_hf_path` gives structure (its config.json is
    authoritative) and weights, and ModelHub the class. Under `torch.device("meta")` only the structure is built.

    Attributes:
        model: the transformers model; paths in fsdp2.yaml are relative to it.
        source_dtype: dtype of the HF directory's weights; exports are written in it.
        traits: names of the model's parts and towers.
        loss_options: `loss_cfg` of model.json.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        described = TransformersModelConfig.from_dict(config)
        self.described = described
        ModelHub.import_plugins(described.plugin)
        assert described.init_from_hf_path is not None  # from_dict requires it
        self.source = described.init_from_hf_path
        hf_config = load_hf_config(self.source, f"{described.file}: init_from_hf_path")
        self.source_dtype: torch.dtype | None = getattr(hf_config, "dtype", None)
        model_class: Any = ModelHub.get(described.model_id, hf_config, where=described.file)
        hf_config = config_for(model_class, hf_config)
        set_attention(hf_config, described, model_class)
        self.model = _build(model_class, hf_config, described)
        if self.model.get_output_embeddings() is None:
            raise ConfigError(
                f"{self.source}/config.json: {model_class.__name__} has no output layer over the vocabulary, so it "
                'writes no text; expected "architectures" with a class that writes text, such as '
                f"{likely_architecture(hf_config.model_type) or 'Qwen3ForCausalLM'}"
            )
        self.traits: FamilyTraits = traits_of(self.model)
        self.model.train()
        self._freeze(described)  # a model's own hook may put frozen parts into evaluation mode
        if (lora := current_build_context().lora) is not None:
            inject_adapters(self.model, lora, self.traits.parts)
        self.loss_options = LossOptions.of(current_build_context().loss, described.loss_cfg)
        text = self.model.config.get_text_config()
        self._has_own_router_loss = bool(getattr(text, "output_router_logits", False))
        cap = cap_of_logits(text, type(self.model).__name__)
        self._head_loss = HeadLoss(self.model.get_output_embeddings(), self.loss_options, cap)
        self._router_loss = _router_loss(self.model, described)
        self._expert_load = ExpertLoad(self.model)
        self._idle_towers = IdleTowers(self.model, self.traits.towers)
        self._boundaries: SampleBoundaries | None = None
        self._documents: DocumentAttention | None = None
        self._positions: ExactPositions | None = None
        if self.traits.language_model is not None:
            self._positions = ExactPositions(self.model.get_submodule(self.traits.language_model))
        self._context = self._context_parallel()
        if self._context is not None:
            self.model.context_parallel = self._context
        elif why_by_masks(self.model, self.traits, described) is None:
            language_model = self.model.get_submodule(str(self.traits.language_model))
            self._documents = DocumentAttention(language_model, type(self.model).__name__)
            if self.traits.attention != "causal":
                self._boundaries = SampleBoundaries(language_model, type(self.model).__name__, only=LINEAR)
        elif self.traits.packed_positions is not None and self.traits.language_model is not None:
            language_model = self.model.get_submodule(self.traits.language_model)
            self._boundaries = SampleBoundaries(language_model, type(self.model).__name__)
        attend_in_towers(self.model, self.traits.towers, described)
        self._host_inputs = HostInputs(self.model, self.traits.towers)
        self._places = KnownPlaces(self.model, self.traits.placeholders) if self.traits.placeholders else None
        self._media = split_media(self.model, self.traits.towers)
        self._loss_group: dist.ProcessGroup | None = None

    def _context_parallel(self) -> ContextParallel | None:
        """What splits the tokens of rows over ranks, if the run does."""
        dims, name = current_build_context().dims, type(self.model).__name__
        if dims is None or dims.cp == 1:
            return None
        path = require_causal_attention(self.traits, name, dims.cp)
        return ContextParallel(self.model.get_submodule(path), name, dims)

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Prepare a collated micro-batch on the host: find its target positions, and the positions of packed samples.

        Args:
            batch: input_ids and labels [batch, sequence], media tensors, and attention_mask or, for packed rows,
                documents (see `models/common/packed.py`); `labels_are_shifted`, if labels are.

        Raises:
            DataError: `documents` is malformed; see `take_documents`.
            ConfigError: the rows are packed, and the model can't train on packed rows.
        """
        batch = dict(batch)
        documents = take_documents(batch)
        batch["targets"] = targets_of_batch(batch, self.loss_options.loss_type, documents)
        if documents is not None:
            positions_of = require_packed_positions(self.traits, type(self.model).__name__)
            batch["position_ids"] = positions_of(self.model, batch, documents)
            batch["packed_rows"] = PackedRows.of(documents)
        if self._documents is not None and (documents is not None or self.traits.attention == "causal"):
            batch[KEYWORD] = row_documents(batch, documents)
        if self._expert_load.has_experts and documents is not None:
            batch["is_token"] = documents > 0
        if self._router_loss is not None:
            mask = batch.get("attention_mask")
            batch["sample_shares"] = SampleShares.of(batch["targets"], batch["input_ids"], mask, documents)
        if self._context is not None:
            self._split_tokens(self._context, batch, documents)
        if self.traits.prepare_batch is not None:
            batch = self.traits.prepare_batch(self.model, batch)
        if self._media is not None:
            batch["media_shards"] = self._media.cut(batch)
        if self._places is not None:
            batch[PLACES] = self._places.find(batch)
        keep_grids(self.model, batch, self.traits.towers)
        mask = batch.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.shape == batch["input_ids"].shape and bool(mask.all()):
            del batch["attention_mask"]  # it says nothing, and a model would have to look at it to find that
        return batch

    def _split_tokens(self, context: ContextParallel, batch: dict[str, Any], documents: torch.Tensor | None) -> None:
        """Add the shard of this rank to a prepared micro-batch, and leave it the targets and samples of that shard."""
        if documents is None:
            documents = documents_of_mask(batch.get("attention_mask"), batch["input_ids"].shape)
        shard = batch["sequence_shard"] = context.shard_of(documents)
        batch["targets"] = batch["targets"].cut(shard)
        if self._router_loss is not None:
            batch["sample_shares"] = batch["sample_shares"].cut(shard)
        if self._expert_load.has_experts:
            batch["is_token"] = shard.cut(documents, 1, fill=0) > 0

    def check_packing(self) -> None:
        """Check, before a run begins, that the model and its attention keep the samples of packed rows separate.

        Raises:
            ConfigError: they don't; the message names the key to change.
        """
        require_packed_positions(self.traits, type(self.model).__name__)
        if self._boundaries is not None:
            self._boundaries.check_implementation()

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, outputs: bool = False, **batch: Any
    ) -> LossOutput | ModelOutput:
        """Run the model on a micro-batch.

        Args:
            input_ids: [batch, sequence] int64.
            labels: [batch, sequence] int64, not shifted, -100 = no target. None: the plain model output is returned.
            outputs: return `log_probabilities` beside the loss: that of each target token, in the order of `targets`.
            batch: attention_mask, media fields and so on, as the transformers model takes them; `targets` and, for
                packed rows, `position_ids` and `packed_rows` as `prepare` computed them on the host.

        Returns:
            the loss. Where the load-balancing loss is trained, `metrics` has `router_aux_loss`; its gradient, times its
            coefficient, is part of the gradient of `loss`, but its value is not part of the value of `loss`.
        """
        targets: Targets | None = batch.pop("targets", None)
        shares: SampleShares | None = batch.pop("sample_shares", None)
        is_token: torch.Tensor | None = batch.pop("is_token", batch.get("attention_mask"))
        if unprepared := {"documents", "labels_are_shifted"} & batch.keys():
            key = min(unprepared)
            raise DataError(f"a micro-batch with '{key}' came to the model as it was collated; call prepare() first")
        if self._context is not None:
            self._expect_shard(self._context, batch.pop("sequence_shard", None), input_ids, labels)
        self._announce(batch)
        if labels is None:
            return self.model(input_ids=input_ids, use_cache=False, **batch)
        if targets is None:
            targets = select_targets(labels, self.loss_options.loss_type)
        factor = None if self.expected_factor is None else self.expected_factor(targets.tokens.shape[0])
        self._head_loss.expect(targets, input_ids.shape[0], factor, each=outputs)
        if self._router_loss is not None:
            shares = shares or SampleShares.of(targets, input_ids, batch.get("attention_mask"))
            self._router_loss.expect()
        if self._expert_load.has_experts:
            self._expert_load.expect(None if is_token is None else is_token > 0)
        if self._has_own_router_loss:
            batch["output_router_logits"] = False  # transformers would compute its own loss over the whole micro-batch
        logits = self.model(input_ids=input_ids, use_cache=False, **batch).logits
        of_head = self._head_loss.read(logits, type(self.model).__name__)
        loss_sum = weighted_sum(of_head, targets.weights) if outputs else of_head
        metrics: dict[str, Any] = {}
        if (routed := self._expert_load.take()) is not None:
            metrics["routed_tokens"] = routed
        counted = self._context is None or self._context.world.context.rank == 0  # what the ranks of a row share
        if self._router_loss is not None and shares is not None:
            balance = self._router_loss.take(shares, None if self._context is None else self._context.world.context)
            loss_sum = AddGradient.apply(loss_sum, self._router_loss.coefficient * balance)
            metrics["router_aux_loss"] = (balance.detach() * counted, shares.weights.sum() * counted)
        output = finish_loss(loss_sum, targets.denominator, self.loss_options.loss_type, self._loss_group)
        if output["denominator"] is not None:
            output["denominator"] = output["denominator"] * counted
        output["metrics"].update(metrics)
        if outputs:
            output["log_probabilities"] = of_head
        return output

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Context in which transformers may generate with `model`: every rank that calls it has whole rows.

        What `forward` sets for a micro-batch is used up by then, but for the split of media. Afterwards `model` has the
        positions of before, which some classes keep for the next token.
        """
        kept = {module: module.rope_deltas for module in self.model.modules() if "rope_deltas" in vars(module)}
        if self._media is not None:
            self._media.for_batch({})
        if self._context is not None:
            self._context.is_off = True
        try:
            yield
        finally:
            if self._context is not None:
                self._context.is_off = False
            for module, deltas in kept.items():
                module.rope_deltas = deltas

    def _announce(self, batch: dict[str, Any]) -> None:
        """Hand a prepared micro-batch's fields to what the next forward pass of the model needs them for."""
        packed_rows = batch.pop("packed_rows", None)
        needs_no_masks = batch.get(KEYWORD) is not None and self.traits.attention == "causal"
        if self._context is None and packed_rows is not None and not needs_no_masks and self.traits.packed_masks:
            batch["attention_mask"] = self.traits.packed_masks(self.model, {**batch, "packed_rows": packed_rows})
        if self._documents is not None:
            self._documents.for_batch(batch.pop(KEYWORD, None))
        if self._boundaries is not None:
            self._boundaries.for_batch(packed_rows)
        if self._positions is not None:
            self._positions.for_batch(batch)
        if self._media is not None:
            self._media.for_batch(batch.pop("media_shards", {}))
        if self._places is not None:
            self._places.for_batch(batch)
        self._host_inputs.for_batch(batch)
        self._idle_towers.for_batch(batch)

    def _expect_shard(
        self,
        context: ContextParallel,
        shard: SequenceShard | None,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None,
    ) -> None:
        if shard is None:
            raise DataError(
                "a micro-batch came to the model without 'sequence_shard', which context parallelism needs; call "
                "prepare() first"
            )
        if labels is None:
            raise ConfigError(
                f"{type(self.model).__name__} was called without labels: with --context-parallel-size "
                f"{context.world.context.size} a rank has the output of its own tokens only, and only losses are "
                "summed over ranks; pass labels, or set it to 1"
            )
        context.for_batch(shard, input_ids)

    def fully_shard(self, process_group: dist.ProcessGroup | None = None, fsdp2_config_path: str | None = None) -> bool:
        """Shard the inner model; see FSDP2Mixin.fully_shard."""
        self._loss_group = process_group
        as_shardable(self.model)
        self.model.weights_come_later = self.weights_come_later
        self._override_sharding(fsdp2_config_path)
        done = self.model.fully_shard(process_group=process_group, fsdp2_config_path=fsdp2_config_path)
        if self.traits.language_model is not None and dist.get_world_size(process_group) > 1:
            self._idle_towers.install(self.model.get_submodule(self.traits.language_model))
        return done

    def plan_sharding(self, world_size: int, fsdp2_config_path: str | None = None) -> ShardingOutline:
        """See FSDP2Mixin.plan_sharding."""
        self._override_sharding(fsdp2_config_path)
        return self.model.plan_sharding(world_size, fsdp2_config_path)

    def _override_sharding(self, fsdp2_config_path: str | None) -> None:
        self.model.fsdp2_overrides = {
            **self.model.fsdp2_overrides,
            **self._recompute_overrides(fsdp2_config(fsdp2_config_path)),
        }

    expected_factor: Callable[[int], float | torch.Tensor] | None = None
    """In float16: number of target tokens of a micro-batch → approximate gradient of its summed loss in backward."""
    weights_come_later: bool = False

    @property
    def sharded_module(self) -> torch.nn.Module:
        """The module that `fully_shard` shards; checkpoints use its parameter names."""
        return self.model

    @property
    def pending_weights(self) -> str | None:
        """The HF directory that fills a model built on meta after sharding; None: its weights are drawn at random."""
        return None if self.described.train_from_scratch else self.source

    def _recompute_overrides(self, config: Fsdp2Config) -> dict[str, Any]:
        """Return the override for non-reentrant recompute if the routers' autograd graph must be kept."""
        if self._router_loss is None or not config.recompute_modules or not config.use_reentrant:
            return {}
        notice(
            "fsdp2.yaml: recomputed with use_reentrant: false, because the reentrant way hides the routers from their "
            "load-balancing loss (loss_cfg.router_aux_loss_coef)"
        )
        return {"use_reentrant": False}

    def _freeze(self, described: TransformersModelConfig) -> None:
        stated = {part: getattr(described, f"freeze_{part}") for part in _PARTS}
        frozen = {part: value for part, value in stated.items() if value is not None}
        done = freeze_parts(self.model, self.traits, frozen)
        done += freeze_paths(self.model, described.freeze, where=f"{described.file}: freeze")
        as_trainable(self.model).freeze(self.config)  # a model's own hook may freeze more parts
        for part, value in frozen.items():
            if value and part not in self.traits.parts:
                notice(
                    f"model.json: freezing {part} has no effect: {type(self.model).__name__} has no such part; it has: "
                    f"{', '.join(self.traits.parts) or 'none'}"
                )
        if not any(p.requires_grad for p in self.model.parameters()):
            few = ", ".join(done[:5]) + (", …" if len(done) > 5 else "")
            raise ConfigError(f"{described.file}: everything is frozen ({few}); nothing would be trained")


def load_hf_config(path: str, where: str = "model.json: init_from_hf_path") -> Any:
    """Read config.json of a HF directory.

    Args:
        where: the file and key that name it, for messages.

    Raises:
        ConfigError: the directory or its config.json is missing, or the model type is unknown to transformers, or the
            layout is that of the authors' own code.
    """
    directory = Path(path)
    refuse_foreign_layout(directory, where)
    hf_config = read_hf_config(directory, where, current_build_context().trust_remote_code)
    settle_tying(hf_config, directory)
    return hf_config


def load_pretrained(model_class: Any, hf_config: Any, path: str) -> Any:
    """Load a HF directory in float32 into host memory; no weight may be missing.

    Raises:
        CheckpointError: there is no weight file, or weights are missing from it.
    """
    _require_weights(path)
    try:
        # a device context (meta) of the caller must not reach the weights
        with torch.device("cpu"):
            model, info = model_class.from_pretrained(
                path,
                config=hf_config,
                dtype=torch.float32,
                output_loading_info=True,
                trust_remote_code=current_build_context().trust_remote_code,
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"weights in '{path}' can't be loaded into {model_class.__name__}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"'{path}' lacks {len(missing)} weights of {model_class.__name__}: {', '.join(missing[:5])}"
            f"{' …' if len(missing) > 5 else ''}; its files hold other names, for example "
            f"{', '.join(sorted(info['unexpected_keys'])[:3]) or 'none'}"
        )
    if info["unexpected_keys"]:
        notice(
            f"'{path}': {len(info['unexpected_keys'])} weights are not part of {model_class.__name__} and are not read"
        )
    with torch.device("meta"):
        stated = dict(_structure(model_class, hf_config).named_parameters())
    for name, parameter in model.named_parameters():  # loading resets what the class freezes
        parameter.requires_grad_(stated[name].requires_grad)
    return model


def _build(model_class: Any, hf_config: Any, described: TransformersModelConfig) -> Any:
    context = current_build_context()
    check_first_weights(
        model_class.__name__,
        described.init_from_hf_path,
        from_scratch=described.train_from_scratch,
        ignores=described.ignore_weights,
        file=described.file,
        keys=("init_from_hf_path", "'init_from_hf_path' (a HF directory) or --load (a checkpoint that is there)"),
    )
    on_meta = torch.get_default_device().type == "meta"
    if on_meta or context.defer_weights:
        if context.load_weights and not described.train_from_scratch:
            _require_weights(str(described.init_from_hf_path))
        with torch.device("meta"):
            return _structure(model_class, hf_config)
    if not context.load_weights:
        return _structure(model_class, hf_config)
    if described.train_from_scratch:
        model = _structure(model_class, hf_config)
        model.draw_weights(storage_is_empty=False)
        return model
    return load_pretrained(model_class, hf_config, str(described.init_from_hf_path))


def _router_loss(model: Any, described: TransformersModelConfig) -> RouterLoss | None:
    """Return the experts' load-balancing loss if model.json or the model's own config asks for it."""
    is_stated = "router_aux_loss_coef" in described.loss_cfg.model_fields_set
    coefficient = chosen_coefficient(described.loss_cfg.router_aux_loss_coef if is_stated else None, model.config)
    return RouterLoss(model, coefficient) if coefficient else None


def _require_weights(path: str) -> None:
    if not weight_files(path):
        raise CheckpointError(
            f"init_from_hf_path '{path}' holds no *.safetensors; put the weights there, or set "
            '"train_from_scratch": true in model.json to start from random ones'
        )


def _structure(model_class: Any, hf_config: Any) -> Any:
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = model_class._from_config(hf_config, dtype=torch.float32)
    model.tie_weights()  # transformers skips it together with the initialisation
    return model
