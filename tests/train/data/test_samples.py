from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.train.data.corpus import Corpus, Document
from penstock.train.data.samples import Batch, WindowSamples, batch_of, permute, window_positions


@pytest.fixture
def counting(tmp_path: Path) -> Corpus:
    """A corpus whose token at position n is n."""
    np.save(tmp_path / "n.npy", np.arange(1000))
    return Corpus([Document(tmp_path / "n.npy", 0, 1000, 0)])


def batch(corpus: Corpus, step: int, seed: int = 0, vocabulary: int = 1000, size: int = 4) -> Batch:
    rows = WindowSamples(corpus, 10, seed, "training").read(np.arange(step * size, (step + 1) * size))
    return batch_of(rows, vocabulary, target_is_input=False)


def test_a_batch_is_a_function_of_seed_and_step(counting: Corpus):
    first = [batch(counting, step).x for step in range(6)]
    assert torch.equal(batch(counting, 3).x, first[3])  # whatever was asked before
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(batch(counting, 0, seed=1).x, first[0])
    # The size of the batch does not change the order of samples.
    assert torch.equal(torch.cat([batch(counting, step, size=8).x for step in range(3)]), torch.cat(first))


def test_targets_are_the_tokens_that_follow(counting: Corpus):
    one = batch(counting, 3)
    assert one.x.shape == one.y.shape == (4, 10)
    assert one.x.dtype == one.y.dtype == torch.int64
    assert torch.equal(one.y, one.x + 1)
    assert one.x.is_contiguous()
    assert one.y.is_contiguous()
    assert one.valid == 40


@settings(max_examples=50)
@given(tokens=st.integers(2, 500), sequence=st.integers(1, 40), seed=st.integers(0, 5))
def test_an_epoch_reads_nothing_twice_and_stays_inside(tokens: int, sequence: int, seed: int):
    if tokens < sequence + 1:
        return
    per_epoch = (tokens - min(sequence, tokens - sequence)) // sequence
    for epoch in range(3):
        samples = np.arange(epoch * per_epoch, (epoch + 1) * per_epoch)
        starts = np.sort(window_positions(samples, tokens, sequence, seed))
        assert starts[0] >= 0
        assert starts[-1] + sequence + 1 <= tokens
        assert (np.diff(starts) == sequence).all()


def test_every_epoch_has_an_order_and_a_start_of_its_own():
    first, second = (window_positions(np.arange(49) + 49 * e, 500, 10, 0) for e in range(2))
    assert first.tolist() != second.tolist()
    assert {p % 10 for p in first} != {p % 10 for p in second}


def part_of(corpus: Corpus, length: int) -> WindowSamples:
    return WindowSamples(Corpus([Document(corpus.documents[0].path, 0, length, 0)]), 10, 0, "held-out")


def test_held_out_samples_lie_evenly_from_the_first_to_the_last_token(counting: Corpus):
    rows = part_of(counting, 111).spread(5)
    assert [int(row.tokens[0]) for row in rows] == [0, 25, 50, 75, 100]
    assert all(np.array_equal(row.labels[1:], row.tokens + 1) for row in rows)
    assert [int(row.tokens[0]) for row in part_of(counting, 11).spread(3)] == [0, 0, 0]


def test_once_has_every_token_once_as_a_label(counting: Corpus):
    for length in (11, 20, 21, 22, 999, 1000):
        labels = np.concatenate([row.labels[1:] for row in part_of(counting, length).once()])
        assert labels[labels >= 0].tolist() == list(range(1, length))


def test_a_token_outside_the_vocabulary_is_an_error(counting: Corpus):
    rows = WindowSamples(counting, 10, 0, "training").spread(2)
    with pytest.raises(DataError, match=r"the data has a token 999; model.vocabulary is 999"):
        batch_of(rows, 999, target_is_input=False)
    assert batch_of(rows, 1000, target_is_input=False).y[-1, -1] == 999


def test_a_negative_token_is_an_error(tmp_path: Path):
    np.save(tmp_path / "n.npy", np.array([3, -1, 2]))
    rows = WindowSamples(Corpus([Document(tmp_path / "n.npy", 0, 3, 0)]), 2, 0, "training").spread(1)
    with pytest.raises(DataError, match="a token -1"):
        batch_of(rows, 10, target_is_input=False)


def test_too_little_text_is_an_error(counting: Corpus):
    WindowSamples(counting, 999, 0, "training")
    with pytest.raises(DataError, match="the training files hold 1000 tokens; a sample takes 1001"):
        WindowSamples(counting, 1000, 0, "training")


def test_every_permutation_of_an_epoch_and_seed_has_an_order_of_its_own():
    orders = [permute(np.arange(97), 97, *key).tolist() for key in ((3, 0), (3, 1), (4, 0))]
    assert len({tuple(order) for order in orders}) == 3
    assert permute(np.array([3, 0]), 97, 3, 1).tolist() == [orders[1][3], orders[1][0]]


@settings(max_examples=30)
@given(count=st.integers(1, 3000), seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_an_order_is_a_permutation(count: int, seed: int, epoch: int):
    assert sorted(permute(np.arange(count), count, seed, epoch).tolist()) == list(range(count))


def test_an_order_is_well_mixed():
    order = permute(np.arange(4096), 4096, 0, 0)
    assert abs(np.corrcoef(order, np.arange(4096))[0, 1]) < 0.06
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.06
