"""A sample's text in pieces, and placeholders that stand many times."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mindspeed_mm.data.conversation.rendered import TextPiece, text_pieces
from tests.support.tiny import tiny_qwen2_5_vl_dir


@pytest.mark.parametrize("pads", [1, 9])
def test_pieces_are_the_text_of_their_tokens(pads: int, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2_5_vl_dir(tmp_path, weights=False))
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    question, answer = tokenizer.encode("which digit"), tokenizer.encode("seven two")
    ids = [*question, *[pad] * pads, *answer, *question]
    labels = [-100] * (len(question) + pads) + answer + [-100] * len(question)
    placeholder = "<|image_pad|>" if pads == 1 else "<|image_pad|> \u00d7 9"
    assert text_pieces(ids, labels, tokenizer) == [
        TextPiece(f"which digit{placeholder}", False, len(question) + pads),
        TextPiece(tokenizer.decode(answer), True, len(answer)),
        TextPiece(tokenizer.decode(question), False, len(question)),
    ]
