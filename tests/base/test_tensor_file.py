"""Files of tensors are interchangeable with those of the safetensors library; other files are refused."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.base.tensor_file import DTYPES, TensorFile, write_tensors


def examples() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {str(dtype): (8 * torch.randn(3, 4)).to(dtype) for dtype in DTYPES.values()}
    return found | {"": torch.tensor(2.5), "none": torch.empty(0, 3), "ü/ö": torch.arange(24).view(2, 3, 4)}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> list[int]:
        return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()

    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def test_files_of_the_library_are_read(tmp_path: Path):
    state = examples()
    save_file(state, tmp_path / "x.safetensors", {"format": "pt"})
    with TensorFile(tmp_path / "x.safetensors") as file:
        assert file.entries.keys() == state.keys()
        assert all(same(file.read(name), tensor) for name, tensor in state.items())


def test_the_library_reads_our_files(tmp_path: Path):
    state = examples()
    write_tensors(tmp_path / "x.safetensors", state, {"format": "pt"})
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == state.keys()
    assert all(same(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_slice_along_any_dimension_is_read(tmp_path: Path, dim: int):
    whole = torch.arange(3 * 4 * 5, dtype=torch.int16).view(3, 4, 5)
    write_tensors(tmp_path / "x.safetensors", {"before": torch.ones(7), "x": whole})
    with TensorFile(tmp_path / "x.safetensors") as file:
        for start in range(whole.shape[dim] + 1):
            for stop in range(start, whole.shape[dim] + 1):
                run = (slice(None),) * dim + (slice(start, stop),)
                assert same(file.read("x", dim, run[-1]), whole[run])


def test_files_have_the_mode_that_the_umask_says(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write_tensors(tmp_path / "x.safetensors", {"x": torch.ones(2)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.safetensors").stat().st_mode) == 0o640


def test_a_file_truncated_after_it_was_opened_is_an_error_and_not_the_end_of_the_process(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x": torch.ones(100_000)})
    with TensorFile(path) as file:
        kept = file.read("x")
        os.truncate(path, 5_000)
        with pytest.raises(OSError, match="it became shorter while it was being read"):
            file.read("x")
    assert kept.sum() == 100_000  # in separate memory, not the file's


def with_header(header: object, data: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(*, dtype: object = "F32", shape: object = (2,), places: object = (0, 8)) -> object:
    return {"dtype": dtype, "shape": shape, "data_offsets": places}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is not a file of safetensors, or is cut short"),
        (b"\xff" * 40, "it is not a file of safetensors, or is cut short"),
        (with_header(b"no JSON"), "its header is not JSON"),
        (with_header(b"[" * 50_000), "its header is not JSON"),
        (with_header([1]), "its header is not a table"),
        (with_header({"x": 3}), "its header says of 'x': 3"),
        (with_header({"x": entry(shape=[-2])}), "its header says of 'x'"),
        (with_header({"x": entry(shape=[True])}), "its header says of 'x'"),
        (with_header({"x": entry(shape=[2.0])}), "its header says of 'x'"),
        (with_header({"x": entry(places=[0])}), "its header says of 'x'"),
        (with_header({"x": entry(dtype=None)}), "its header says of 'x'"),
        (with_header({"x": entry(shape=[1 << 40])}), "'x' is F32 of shape"),
        (with_header({"x": entry(places=[8, 0])}), "'x' is F32 of shape"),
        (with_header({"x": entry(places=[4, 12])}, b"\0" * 12), "'x' does not begin where"),
        (with_header({"x": entry()}, b"\0" * 7), r"bytes, and its header says"),
        (with_header({"x": entry()}, b"\0" * 9), r"bytes, and its header says"),
        (with_header({"x": entry(), "y": entry()}), "'y' does not begin where"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, said: str):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(OSError, match=said):
        TensorFile(path)


def test_an_unknown_dtype_is_listed_but_not_read(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(with_header({"x": entry(dtype="F4", shape=[16])}))
    with TensorFile(path) as file:
        assert file.entries["x"].dtype == "F4"
        with pytest.raises(OSError, match="'x' is 'F4', not one of F64"):
            file.read("x")


def test_a_pipe_is_refused_without_waiting(tmp_path: Path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(OSError, match="it is not a regular file"):
        TensorFile(tmp_path / "x.safetensors")
