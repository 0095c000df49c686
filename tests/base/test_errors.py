from __future__ import annotations

import pytest

from penstock.base.errors import nearest


@pytest.mark.parametrize(
    ("given", "allowed", "hint"),
    [
        ("alfa", ["alpha", "rank"], " (did you mean 'alpha'?)"),
        ("1fb1", ["1f1b", "gpipe"], " (did you mean '1f1b'?)"),
        ("opt", ["gpt2", "llama"], ""),
        ("step", ["steps", "seed"], " (did you mean 'steps'?)"),
        ("tokens", ["steps", "epochs"], ""),
    ],
)
def test_only_what_may_be_misspelt_gets_a_hint(given: str, allowed: list[str], hint: str):
    assert nearest(given, allowed) == hint
