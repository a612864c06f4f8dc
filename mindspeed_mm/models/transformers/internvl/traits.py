"""Parts of InternVL, and its tower for images and frames of videos."""

from __future__ import annotations

import dataclasses

from mindspeed_mm.models.transformers.llava.traits import TOWER, TRAITS

TRAITS = dataclasses.replace(TRAITS, towers=(dataclasses.replace(TOWER, modalities=("image", "video")),))
