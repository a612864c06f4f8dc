"""The assignment of a multimodal model's parts to pipeline stages.

Stages are numbered in the order in which a micro-batch runs through them: with interleaving (virtual pipeline stages)
stage `chunk * pipeline + rank` is chunk `chunk` of pipeline rank `rank`. The vision tower is first, the projector on
the stage where the tower ends or later, followed by the language layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_mm.utils.errors import ConfigError

Lists = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Stage:
    """The parts of a model on a stage.

    Attributes:
        vision_layers, text_layers: layer numbers in the whole model.
        has_patch_embedding, has_projector: whether these parts of the vision tower are on the stage.
        has_embedding, has_head: whether these parts of the language model are on the stage.
    """

    vision_layers: range = range(0)
    has_patch_embedding: bool = False
    has_projector: bool = False
    text_layers: range = range(0)
    has_embedding: bool = False
    has_head: bool = False

    @property
    def has_vision(self) -> bool:
        """Whether any part of the vision tower or the projector is on the stage."""
        return bool(self.vision_layers) or self.has_patch_embedding or self.has_projector

    @property
    def has_text(self) -> bool:
        """Whether any part of the language model is on the stage."""
        return bool(self.text_layers) or self.has_embedding or self.has_head


def plan_stages(
    pipeline: int,
    virtual: int | None,
    *,
    text_layers: int,
    vision_layers: int | None = None,
    text: Lists | None = None,
    vision: Lists | None = None,
    projector: Lists | None = None,
) -> list[Stage]:
    """Return the stages, in the order in which a micro-batch runs through them.

    Args:
        pipeline, virtual: parallel sizes; virtual is None without interleaving.
        text_layers, vision_layers: number of layers in the whole model; vision_layers is None without a tower.
        text, vision, projector: number of layers on each stage as [virtual stage][pipeline rank]; None: vision and
            projector on the first stage, the language layers evenly, with the remainder on the first stages.

    Raises:
        ConfigError: without a list, fewer language layers than stages; a list has the wrong length or sum; language
            layers come before the end of the vision tower.
    """
    count = pipeline * (virtual or 1)
    if text is None and text_layers < count:
        raise ConfigError(
            f"{count} pipeline stages (--pipeline-model-parallel-size {pipeline}"
            f"{f' × --virtual-pipeline-model-parallel-size {virtual}' if virtual else ''}) for {text_layers} language "
            "layers: lower them, or set model.json's text_decoder.pipeline_num_layers with 0 for stages without any"
        )
    text_counts = _counts("text_decoder", text, text_layers, pipeline, virtual) or _evenly(text_layers, count)
    starts_at = next(i for i, n in enumerate(text_counts) if n)
    vision_counts, projector_at = [0] * count, None
    if vision_layers is not None:
        first = [vision_layers] + [0] * (count - 1)
        vision_counts = _counts("image_encoder.vision_encoder", vision, vision_layers, pipeline, virtual) or first
        ends_at = max(i for i, n in enumerate(vision_counts) if n)
        projector_counts = _counts("image_encoder.vision_projector", projector, 1, pipeline, virtual)
        projector_at = projector_counts.index(1) if projector_counts else ends_at
        if not ends_at <= projector_at <= starts_at:
            raise ConfigError(
                f"model.json: the vision tower ends on stage {ends_at}, its projector is on stage {projector_at}, and "
                f"the language layers begin on stage {starts_at} (stages counted from 0 in a micro-batch's order); "
                "expected pipeline_num_layers in which they follow each other"
            )
    return [
        Stage(
            vision_layers=v,
            has_patch_embedding=bool(v) and v.start == 0,
            has_projector=i == projector_at,
            text_layers=t,
            has_embedding=i == starts_at,
            has_head=i == count - 1,
        )
        for i, (v, t) in enumerate(zip(_ranges(vision_counts), _ranges(text_counts), strict=True))
    ]


def needs_variable_shapes(stages: Sequence[Stage]) -> bool:
    """Whether stages exchange other tensors than the language model's hidden states."""
    return any(not stage.has_text for stage in stages[:-1])


def _evenly(layers: int, count: int) -> list[int]:
    each, over = divmod(layers, count)
    return [each + (i < over) for i in range(count)]


def _counts(part: str, lists: Lists | None, layers: int, pipeline: int, virtual: int | None) -> list[int] | None:
    if lists is None:
        return None
    counts = list(itertools.chain.from_iterable(lists))
    where = f"model.json: {part}.pipeline_num_layers"
    if len(lists) != (virtual or 1) or any(len(row) != pipeline for row in lists):
        expected = f"{virtual} lists of {pipeline}" if virtual else f"one list of {pipeline}"
        raise ConfigError(
            f"{where} has {len(lists)} × {len(lists[0]) if lists else 0} numbers; expected {expected}: one for each "
            "pipeline stage"
        )
    if sum(counts) != layers:
        raise ConfigError(f"{where} {counts} adds up to {sum(counts)}; the model has {layers}")
    return counts


def _ranges(counts: Sequence[int]) -> list[range]:
    ends = list(itertools.accumulate(counts))
    return [range(end - n, end) for n, end in zip(counts, ends, strict=True)]
