"""Other things than files, and files that are too large, are refused without waiting or allocating."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.base.bounded_io import LongNumberError, open_regular, parse_json, read_bytes, require_regular


def test_a_file_within_its_bound_is_read(tmp_path: Path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 3_000_000)
    assert read_bytes(path, 3_000_000) == path.read_bytes()
    with pytest.raises(OSError, match="more than 2,999,999 bytes"):
        read_bytes(path, 2_999_999)
    os.truncate(path, 1 << 40)  # a hole, which is not read
    with pytest.raises(OSError, match="more than 10 bytes"):
        read_bytes(path, 10)


def test_pipes_devices_and_folders_are_no_files(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(OSError, match="not a regular file"):
            require_regular(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path, 10)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none", 10)


def test_a_device_and_the_output_of_another_command_are_read_up_to_their_bound():
    with pytest.raises(OSError, match="more than 5,000,000 bytes"):
        read_bytes("/dev/zero", 5_000_000, pipes=True)
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "wb") as file:
        file.write(b"F = 1")
        file.close()
        assert read_bytes(f"/dev/fd/{reader}", 100, pipes=True) == b"F = 1"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, b"\xff", "1" * 5000, "nothing"], ids=lambda t: str(t)[:9]
)
def test_json_has_one_kind_of_error(text: str | bytes):
    with pytest.raises(ValueError):  # noqa: PT011  # whose words are json's own
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [("1" * 4301, "it"), (f"[{'-1' + '0' * 5000}]", "it"), (f'{{"a": 1, "b": {"9" * 4301}}}', "'b'")],
)
def test_a_number_of_too_many_digits_is_named_by_its_field(text: str, name: str):
    with pytest.raises(LongNumberError, match=f"^{name} has a whole number of more than 4,300 digits"):
        parse_json(text)
    assert parse_json(f'{{"a": {"9" * 4300}}}') == {"a": int("9" * 4300)}


def test_a_path_with_a_nul_character_is_an_error_of_the_system():
    for reader in (require_regular, open_regular, lambda path: read_bytes(path, 10, pipes=True)):
        with pytest.raises(OSError, match="null"):
            reader("a\0b")
