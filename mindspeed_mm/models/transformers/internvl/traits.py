"""Parts of InternVL, and its tower for images and frames of videos."""

from __future__ import annotations

import dataclasses

from mindspeed_mm.models.transformers.llava.traits import TOWER, TRAITS
from mindspeed_mm.parallel.media import MediaSplit

#: each row of the media tensor is an image; the model takes the last layer, unless configured otherwise
TILE_SPLIT = MediaSplit(outputs=("last_hidden_state",), is_possible=lambda config: config.vision_feature_layer == -1)
TRAITS = dataclasses.replace(
    TRAITS, towers=(dataclasses.replace(TOWER, modalities=("image", "video"), split=TILE_SPLIT),)
)
