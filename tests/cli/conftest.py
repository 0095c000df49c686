"""What commands say to a user."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.cli import main


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run ``penstock WORDS`` and return its error, with exit code 2, which must be one line unless it shows the usage."""

    def run(*words: object, usage: bool = False) -> str:
        monkeypatch.setattr("sys.argv", ["penstock", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert usage or (said.err.startswith("penstock: ") and said.err.count("\n") == 1)
        return said.err

    return run
