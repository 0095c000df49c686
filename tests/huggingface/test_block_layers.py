from __future__ import annotations

import copy
import gc
import threading
import weakref

import torch

from penstock.huggingface.block_layers import Tables
from tests.support import hf_models


def tables(family: str = "llama") -> Tables:
    net = hf_models.model(family)
    return Tables(net.config, net.model.rotary_emb, family == "gemma3_text")


HIDDEN = torch.zeros(8, 12, 16)


def test_without_a_mask_the_librarys_causal_path_is_used():
    mask, positions, _ = tables().of("full_attention", HIDDEN, None, None)
    assert mask is None
    assert positions.tolist() == [list(range(12))]


def test_blocks_of_a_microbatch_share_one_mask_and_one_rotary_table():
    made = tables()
    _, _, mask = hf_models.batch()
    first = made.of("full_attention", HIDDEN, mask, None)
    again = made.of("full_attention", HIDDEN.clone(), mask, None)
    assert first[0] is again[0]
    assert first[2] is again[2]
    assert made.of("full_attention", HIDDEN, mask.clone(), None)[0] is not first[0]


def test_each_kind_of_attention_has_its_mask():
    net = hf_models.model("gemma3_text")
    made = Tables(net.config, net.model.rotary_emb, True)
    full, _, slow = made.of("full_attention", HIDDEN, None, None)
    sliding, _, fast = made.of("sliding_attention", HIDDEN, None, None)
    assert full is None
    assert sliding.sum() < torch.ones(8, 1, 12, 12).tril().sum()
    assert not torch.equal(slow[0], fast[0])


def test_an_entry_is_dropped_with_its_mask():
    made = tables()
    _, _, mask = hf_models.batch()
    found = weakref.ref(made.of("full_attention", HIDDEN, mask, None)[0])
    assert found() is not None
    del mask
    gc.collect()
    assert found() is None


def test_a_mask_that_was_written_to_is_made_again():
    made = tables()
    _, _, mask = hf_models.batch()
    before = made.of("full_attention", HIDDEN, mask, None)[0].clone()
    mask[:, 2] = 0
    assert not torch.equal(made.of("full_attention", HIDDEN, mask, None)[0], before)


def test_positions_are_part_of_the_key_of_a_mask():
    made = tables()
    one = torch.arange(12)[None].expand(8, -1).contiguous()
    other = torch.cat((torch.arange(6), torch.arange(6)))[None].expand(8, -1).contiguous()
    assert made.of("full_attention", HIDDEN, None, one)[0] is None
    assert made.of("full_attention", HIDDEN, None, other)[0] is not None
    assert not torch.equal(
        made.of("full_attention", HIDDEN, None, one)[2][0],
        made.of("full_attention", HIDDEN, None, other)[2][0],
    )


def test_tables_made_while_generating_serve_training():
    made = tables()
    with torch.inference_mode():
        made.of("full_attention", HIDDEN, None, None)
    cosine, _ = made.of("full_attention", HIDDEN, None, None)[2]
    assert not cosine.is_inference()


def test_a_copy_of_a_block_shares_them():
    made = tables()
    assert copy.deepcopy(made) is made


def test_many_threads_get_the_same_table():
    made = tables()
    _, _, mask = hf_models.batch()
    found: list[torch.Tensor] = []
    together = threading.Barrier(8)

    def ask() -> None:
        together.wait()
        found.append(made.of("full_attention", HIDDEN, mask, None)[0])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(each is found[0] for each in found)
