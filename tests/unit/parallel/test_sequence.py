"""Which tokens a context-parallel rank has: every one once, in equal parts, documents kept apart."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mindspeed_mm.models.common.loss import LossType, select_targets
from mindspeed_mm.parallel.sequence import FILL, SequencePlace, SequenceShard
from mindspeed_mm.utils.device import move_to_device
from mindspeed_mm.utils.labels import IGNORE_INDEX

# rows of documents; 0 is padding
ROWS = {
    "one token": [[1]],
    "odd": [[1] * 7],
    "odd, long": [[1] * 27],
    "ends where a shard does": [[1] * 8 + [2] * 8],
    "over shards": [[1] + [2] * 13 + [3, 4]],
    "filled up": [[1] * 5 + [0] * 4, [1] * 3 + [2] * 6],
    "left padding": [[0] * 4 + [1] * 5, [1] * 9],
    "nothing but padding": [[0] * 6, [1, 1, 2, 2, 2, 0]],
}
PLACES = {"ulysses 2": (1, 2), "ulysses 4": (1, 4), "ring 2": (2, 1), "ring 4": (4, 1), "2 by 2": (2, 2)}


def shards(documents: torch.Tensor, ring: int, ulysses: int) -> list[list[SequenceShard]]:
    """Of each ring rank, those of its Ulysses ranks."""
    return [
        [SequenceShard.of(documents, SequencePlace(ring, i, ulysses, j)) for j in range(ulysses)] for i in range(ring)
    ]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", ROWS)
def test_every_token_is_on_one_rank(rows: str, place: str) -> None:
    documents = torch.tensor(ROWS[rows])
    ring, ulysses = PLACES[place]
    own = [shard for group in shards(documents, ring, ulysses) for shard in group]
    assert len({shard.index.shape for shard in own}) == 1
    for row, numbers in enumerate(documents):
        found = torch.cat([shard.index[row] for shard in own])
        expected = torch.arange(len(numbers)) if ring == 1 else (numbers > 0).nonzero().squeeze(1)
        assert found[found != FILL].sort().values.tolist() == expected.tolist()
        assert all(shard.is_filled == bool((shard.index == FILL).any()) for shard in own)


@pytest.mark.parametrize("rows", ROWS)
def test_a_ring_rank_has_two_chunks_of_each_document(rows: str) -> None:
    """Head and tail of each, of one size on all ranks; what the chunks say is where the tokens are."""
    documents = torch.tensor(ROWS[rows])
    for rank, (shard,) in enumerate(shards(documents, 2, 1)):
        for row, chunks in enumerate(shard.chunks):
            numbers = [n for n in documents[row].unique_consecutive().tolist() if n]
            parts = shard.index[row].split([*(2 * c for c in chunks), shard.index.shape[1] - 2 * sum(chunks)])
            assert len(parts) == len(numbers) + 1 and bool((parts[-1] == FILL).all())
            for number, size, part in zip(numbers, chunks, parts, strict=False):
                places = (documents[row] == number).nonzero().squeeze(1)
                whole = torch.nn.functional.pad(places, (0, 4 * size - len(places)), value=FILL).chunk(4)
                assert 4 * size - len(places) < 4
                assert part.tolist() == torch.cat([whole[rank], whole[3 - rank]]).tolist()


def test_rows_stay_in_order_without_a_ring() -> None:
    documents = torch.tensor([[1, 1, 1, 2, 2, 0, 0]])
    first, second = shards(documents, 1, 2)[0]
    assert first.index.tolist() == [[0, 1, 2, 3]] and second.index.tolist() == [[4, 5, 6, FILL]]
    assert not first.is_filled and second.is_filled
    for shard in (first, second):
        assert shard.documents is not None and shard.documents.tolist() == [[1, 1, 1, 2, 2, 0, 0, 0]]
        assert shard.cumulative_lengths is not None and shard.cumulative_lengths.tolist() == [0, 3, 5, 8]
        assert shard.cumulative_lengths.dtype == torch.int32 and shard.longest == 3


@pytest.mark.parametrize(
    ("row", "needed"),
    [([1, 1, 1], False), ([1, 1, 0], False), ([0, 1, 1], True), ([1, 2, 2], True), ([0, 0, 0], False)],
)
def test_a_mask_is_made_only_where_causal_attention_does_not_do(row: list[int], needed: bool) -> None:
    for documents in ([row], [[1, 1, 1], row]):
        (shard,) = shards(torch.tensor(documents), 1, 1)[0]
        assert (shard.documents is not None) == needed


def test_cut_takes_rows_with_it() -> None:
    """Tensors of one row for all, of further dimensions before and behind, and what is filled up."""
    documents = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 2, 2, 2]])
    shard = shards(documents, 2, 1)[0][0]
    assert shard.index.tolist() == [[0, 1, FILL, FILL], [0, FILL, 2, FILL]]
    value = torch.arange(2 * 5 * 3.0).view(2, 5, 3)
    for row in range(2):
        for place, position in enumerate(shard.index[row].tolist()):
            expected = value[row, position].tolist() if position != FILL else [-1.0] * 3
            assert shard.cut(value, 1, -1)[row, place].tolist() == expected
    three = torch.stack([value[..., 0]] * 3)
    assert torch.equal(shard.cut(three, -1), torch.stack([shard.cut(value, 1)[..., 0]] * 3))
    positions = shard.cut(torch.arange(5).unsqueeze(0), -1, FILL)
    assert torch.equal(positions, shard.index)
    with pytest.raises(ValueError, match="no 5 positions"):
        shard.cut(torch.zeros(2, 6), 1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("loss_type", ["per_token_loss", "per_sample_loss"])
def test_targets_keep_the_token_that_follows_on_another_rank(loss_type: LossType, place: str) -> None:
    documents = torch.tensor([[1] * 7 + [2] * 2 + [3] * 4, [1] * 11 + [0] * 2])
    labels = torch.arange(26).view(2, 13).masked_fill(documents == 0, IGNORE_INDEX)
    whole = select_targets(labels, loss_type, documents)
    weights = dict(zip(whole.tokens.tolist(), (whole.weights if whole.weights is not None else whole.tokens).tolist()))
    seen = []
    for group in shards(documents, *PLACES[place]):
        for shard in group:
            own = whole.cut(shard)
            assert own.denominator == whole.denominator
            assert shard.cut(labels, 1, IGNORE_INDEX).flatten()[own.index].tolist() == [
                t - 1 for t in own.tokens.tolist()
            ]
            seen += own.tokens.tolist()
            if own.weights is not None:
                assert own.weights.tolist() == [weights[token] for token in own.tokens.tolist()]
    assert sorted(seen) == sorted(whole.tokens.tolist())


def test_all_state_is_in_fields() -> None:
    """As a batch moves to the device, its dataclasses are rebuilt from their fields."""
    shard = shards(torch.tensor([[1, 1, 2, 0, 0]]), 1, 2)[0][1]
    moved = move_to_device({"sequence_shard": shard}, "cpu")["sequence_shard"]
    assert moved is not shard
    for field in dataclasses.fields(shard):
        before, after = getattr(shard, field.name), getattr(moved, field.name)
        assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after
    assert vars(moved).keys() == vars(shard).keys()
