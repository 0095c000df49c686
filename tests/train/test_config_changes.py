"""Keys that differ from a checkpoint's config are named one by one, from what to what."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from penstock.train.config.config import Config, from_mapping
from penstock.train.resume import config_changes

SOURCES = [{"path": "here/a.jsonl", "weight": 3.0}, {"path": "here/b.jsonl"}]


def config(*sources: dict[str, Any], **data: Any) -> Config:
    return from_mapping({"data": {"sources": list(sources), **data}})


def changes(before: Config, now: Config, knows_data: bool = True) -> list[str]:
    return config_changes(asdict(before), now, knows_data=knows_data)


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (
            [SOURCES[0], {**SOURCES[1], "weight": 2.5}],
            ["weight of source 2 in data.sources (b.jsonl) was 1.0 and is 2.5"],
        ),
        (
            [{**SOURCES[0], "weight": 1.0, "text_field": "body"}, SOURCES[1]],
            [
                "weight of source 1 in data.sources (a.jsonl) was 3.0 and is 1.0",
                "text_field of source 1 in data.sources (a.jsonl) was not set and is 'body'",
            ],
        ),
        (SOURCES[:1], ["data.sources had 2 (a.jsonl, b.jsonl) and has 1 (a.jsonl)"]),
        ([], ["data.sources had 2 (a.jsonl, b.jsonl) and has none"]),
        ([{**SOURCES[0], "path": "there/a.jsonl"}, SOURCES[1]], []),
    ],
)
def test_sources_are_compared_key_by_key(sources: list[dict[str, Any]], said: list[str]):
    assert changes(config(*SOURCES), config(*sources)) == said


def test_paths_are_compared_where_no_digest_tells_the_data():
    moved = [{**source, "path": "there.jsonl"} for source in SOURCES]
    assert changes(config(*SOURCES), config(*moved), knows_data=False) == [
        "path of source 1 in data.sources (there.jsonl) was 'here/a.jsonl' and is 'there.jsonl'",
        "path of source 2 in data.sources (there.jsonl) was 'here/b.jsonl' and is 'there.jsonl'",
    ]


def test_held_out_files_may_move_and_not_appear():
    one, two, none = (config(held_out_path=path) for path in ("a.txt", "b.txt", ""))
    assert changes(one, two) == []
    assert changes(one, none) == ["data.held_out_path was 'a.txt' and is ''"]
    assert changes(none, two) == ["data.held_out_path was '' and is 'b.txt'"]


def test_keys_that_are_newer_than_the_checkpoint_have_their_defaults():
    before = asdict(config(*SOURCES))
    del before["data"]["held_out_path"], before["data"]["sources"][0]["messages_field"], before["lora"]
    assert config_changes(before, config(*SOURCES), knows_data=True) == []
    assert config_changes({"data": 5}, config(), knows_data=True) != []
