from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DataError
from penstock.train.data.batches import (
    check_tokens,
    held_out_positions,
    permute,
    sample_positions,
    train_batch,
    windows,
)
from penstock.train.data.corpus import Corpus, Document


@pytest.fixture
def counting(tmp_path: Path) -> Corpus:
    """A corpus whose token at position n is n."""
    np.save(tmp_path / "n.npy", np.arange(1000))
    return Corpus([Document(tmp_path / "n.npy", 0, 1000, 0)])


def batch(corpus: Corpus, step: int, seed: int = 0, vocabulary: int = 1000) -> torch.Tensor:
    return train_batch(corpus, seed=seed, step=step, batch=4, sequence=10, vocabulary=vocabulary)[0]


def test_a_batch_is_a_function_of_seed_and_step(counting: Corpus):
    first = [batch(counting, step) for step in range(60)]
    assert torch.equal(batch(counting, 37), first[37])  # whatever was asked before
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(batch(counting, 0, seed=1), first[0])


def test_targets_are_the_tokens_that_follow(counting: Corpus):
    x, y = train_batch(counting, seed=0, step=3, batch=4, sequence=10, vocabulary=1000)
    assert x.shape == y.shape == (4, 10)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)
    assert x.is_contiguous()
    assert y.is_contiguous()


def test_the_size_of_the_batch_does_not_change_the_order_of_samples(counting: Corpus):
    one = torch.cat([batch(counting, step) for step in range(6)])
    other = [
        train_batch(counting, seed=0, step=s, batch=8, sequence=10, vocabulary=1000)[0] for s in range(3)
    ]
    assert torch.equal(torch.cat(other), one)


@given(tokens=st.integers(2, 500), sequence=st.integers(1, 40), seed=st.integers(0, 5))
def test_an_epoch_reads_nothing_twice_and_stays_inside(tokens: int, sequence: int, seed: int):
    if tokens < sequence + 1:
        return
    per_epoch = (tokens - min(sequence, tokens - sequence)) // sequence
    for epoch in range(3):
        samples = np.arange(epoch * per_epoch, (epoch + 1) * per_epoch)
        starts = np.sort(sample_positions(samples, tokens, sequence, seed))
        assert starts[0] >= 0
        assert starts[-1] + sequence + 1 <= tokens
        assert (np.diff(starts) == sequence).all()


def test_every_epoch_has_an_order_and_a_start_of_its_own():
    first, second = (sample_positions(np.arange(49) + 49 * e, 500, 10, 0) for e in range(2))
    assert first.tolist() != second.tolist()
    assert {p % 10 for p in first} != {p % 10 for p in second}


@given(count=st.integers(1, 3000), seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_an_order_is_a_permutation(count: int, seed: int, epoch: int):
    assert sorted(permute(np.arange(count), count, seed, epoch).tolist()) == list(range(count))


def test_an_order_is_well_mixed():
    order = permute(np.arange(4096), 4096, 0, 0)
    assert abs(np.corrcoef(order, np.arange(4096))[0, 1]) < 0.06
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.06


def test_held_out_samples_lie_evenly_from_the_first_to_the_last_token():
    assert held_out_positions(111, 5, 10).tolist() == [0, 25, 50, 75, 100]
    assert held_out_positions(11, 3, 10).tolist() == [0, 0, 0]


def test_a_token_outside_the_vocabulary_is_an_error(counting: Corpus):
    with pytest.raises(DataError, match=r"the data has a token 999; model.vocabulary is 999"):
        windows(counting, np.array([989]), 10, 999)
    assert windows(counting, np.array([989]), 10, 1000)[1][0, -1] == 999


def test_a_negative_token_is_an_error(tmp_path: Path):
    np.save(tmp_path / "n.npy", np.array([3, -1, 2]))
    with pytest.raises(DataError, match="a token -1"):
        windows(Corpus([Document(tmp_path / "n.npy", 0, 3, 0)]), np.array([0]), 2, 10)


def test_too_little_text_is_an_error(counting: Corpus):
    check_tokens(counting, "training", 999)
    with pytest.raises(DataError, match="the training files hold 1000 tokens; a sample takes 1001"):
        check_tokens(counting, "training", 1000)
