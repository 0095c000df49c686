from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from penstock.base.errors import ConfigError
from penstock.cli import group

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_keys_are_explained_by_name():
    printed = CliRunner().invoke(group, ["config", "optim.clip", "sample.top_k"])
    assert printed.output == (
        "optim.clip = 1\n    number at least 0\n    limit of the global gradient norm; 0 for none.\n\n"
        "sample.top_k = 40\n    whole number at least 0\n    number of likeliest tokens to draw from; 0 draws from all.\n"
    )


def test_the_page_is_what_markdown_prints():
    assert CliRunner().invoke(group, ["config", "--markdown"]).output == PAGE.read_text()


def test_bad_names_are_refused():
    assert isinstance(CliRunner().invoke(group, ["config", "lr"]).exception, ConfigError)
    assert CliRunner().invoke(group, ["config", "lr", "--markdown"]).exit_code == 2
