"""Keys that differ from a checkpoint's config are named one by one, from what to what."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.train.config.config import Config, from_mapping
from penstock.train.resume import config_changes


def config(**data: Any) -> Config:
    return from_mapping({"data": data})


def changes(before: Config, now: Config, knows_data: bool = True) -> list[str]:
    return config_changes(asdict(before), now, knows_data=knows_data)


def test_keys_are_compared_one_by_one():
    before, now = config(path="a.txt", sequence=64), config(path="b.txt", sequence=32, text_field="body")
    said = ["data.text_field was 'text' and is 'body'", "data.sequence was 64 and is 32"]
    assert changes(before, now) == said
    assert changes(before, now, knows_data=False) == ["data.path was 'a.txt' and is 'b.txt'", *said]


def test_held_out_files_may_move_and_not_appear():
    one, two, none = (config(held_out_path=path) for path in ("a.txt", "b.txt", ""))
    assert changes(one, two) == []
    assert changes(one, none) == ["data.held_out_path was 'a.txt' and is ''"]
    assert changes(none, two) == ["data.held_out_path was '' and is 'b.txt'"]


def test_keys_that_are_newer_than_the_checkpoint_have_their_defaults():
    before = asdict(config())
    del before["data"]["held_out_path"], before["data"]["text_field"]
    assert config_changes(before, config(), knows_data=True) == []
    assert config_changes({"data": 5}, config(), knows_data=True) != []
