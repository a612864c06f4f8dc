"""A model of one's own in plain torch: it sees a handwritten digit and writes its name in the language it is asked for.

A tower looks at the patches of the image, a projector brings them to the decoder, and the decoder writes letter by
letter. Nothing in here knows that it is trained in several processes: the three base classes bring that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin, WeightInitMixin

WORDS = {
    "en": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"],
    "fr": ["zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf"],
}
PAD, END = 0, 1
VOCABULARY = ["<pad>", "<end>", *WORDS, *sorted({letter for words in WORDS.values() for letter in "".join(words)})]
LONGEST = 1 + max(len(word) for words in WORDS.values() for word in words)
"""Positions of a text: the language, then a word's letters (the last of which predicts the end)."""
SIDE = 8
"""Pixels of an image's edge."""


class CustomModel(MultiModalModule, FSDP2Mixin, WeightInitMixin):
    """A vision-language model.

    Args:
        config: `width`, `heads`, `patch` (pixels of a patch's edge), `tower_blocks`, `decoder_blocks`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        width, heads, patch = config["width"], config["heads"], config["patch"]
        self.patch = patch
        self.num_patches = (SIDE // patch) ** 2
        self.patch_embed = nn.Linear(patch * patch, width)
        self.places = nn.Embedding(self.num_patches, width)
        self.tower = nn.ModuleList(Block(width, heads) for _ in range(config["tower_blocks"]))
        self.projector = nn.Linear(width, width)
        self.embed = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Embedding(LONGEST, width)
        self.decoder = nn.ModuleList(Block(width, heads) for _ in range(config["decoder_blocks"]))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(VOCABULARY), bias=False)
        self.head.weight = self.embed.weight
        self.init_weights()

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        """Predict the letter after each one.

        Args:
            pixels: [batch, 8, 8] in 0…1.
            ids: [batch, length] the language, then letters.
            labels: [batch, length] what comes next, -100 where nothing is to be learnt.

        Returns:
            `logits` [batch, length, vocabulary] and the labels.
        """
        seen = self.projector(self.see(pixels))
        text = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        hidden = torch.cat([seen, text], dim=1)
        for block in self.decoder:
            hidden = block(hidden, is_causal=True)
        return {"logits": self.head(self.norm(hidden[:, self.num_patches :])), "labels": labels}

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return [batch, patches, width] for images [batch, 8, 8]."""
        rows = pixels.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        patches = rows.reshape(len(pixels), self.num_patches, self.patch * self.patch)
        hidden = self.patch_embed(patches) + self.places.weight
        for block in self.tower:
            hidden = block(hidden)
        return hidden

    @torch.inference_mode()
    def read(self, pixels: torch.Tensor, language: str) -> list[str]:
        """Write the name of each digit in [batch, 8, 8], greedily."""
        ids = torch.full((len(pixels), 1), VOCABULARY.index(language))
        for _ in range(LONGEST - 1):
            new = self(pixels, ids)["logits"][:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], dim=1)
        words = ["".join(VOCABULARY[i] for i in row[1:]) for row in ids.tolist()]
        return [word.split("<end>")[0] for word in words]


class OwnSharding(CustomModel):
    """The same model with a plan of its own: fsdp2.yaml only says how large a shard is, and in what precision."""

    def _fully_shard(self, fsdp2_kwargs: Any = None, fsdp2_config: Any = None) -> None:
        # the tower is small and becomes one unit; the decoder's blocks are recomputed, and one unit each
        self.set_recompute_modules_to_wrap(self, ["decoder.{*}"], use_reentrant=False)
        self.set_fullyshard_modules_to_wrap(self, ["decoder.{*}", "tower.{*}"], **(fsdp2_kwargs or {}))
        num_to_forward_prefetch = getattr(self.fsdp2_config, "num_to_forward_prefetch", 0)
        num_to_backward_prefetch = getattr(self.fsdp2_config, "num_to_backward_prefetch", 0)
        self.set_modules_to_prefetch(num_to_forward_prefetch, num_to_backward_prefetch)


class Block(nn.Module):
    """Attention and an MLP, each on what the norm before it leaves."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
        """[batch, length, width] → the same."""
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(), is_causal=is_causal)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))
