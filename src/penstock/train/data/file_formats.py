"""Formats of data files: found by name and content, and refused where they are not understood."""

from __future__ import annotations

import fnmatch
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from penstock.base.bounded_io import open_regular, parse_json
from penstock.base.errors import DataError, os_errors_as
from penstock.train.config.sections import DataConfig

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_DATASET_FILES = ("dataset_info.json", "dataset_dict.json")
"""Files that tell a folder of ``datasets``: a data set has the first, several splits have the second."""

_PACKED = "zip tar tgz gz bz2 xz zst 7z rar lz4 lzma"
_RECORDS = "json geojson jsonl ndjson parquet pq arrow"
_TABLES = "csv tsv xls xlsx ods orc avro feather tfrecord db sqlite"
_BINARY = (
    "npz pkl pickle pt pth ckpt bin safetensors gguf onnx h5 hdf5 mat msgpack pdf doc docx odt ppt pptx epub png jpg jpeg "
    "gif webp bmp tiff ico mp3 wav flac ogg mp4 mkv mov avi exe dll so o a pyc class jar whl"
)
_HINTS = {
    **dict.fromkeys(_PACKED.split(), "unpack it first"),
    **dict.fromkeys(
        f"{_RECORDS} {_TABLES}".split(),
        "read its records with `datasets` (load_dataset), save them with save_to_disk, and set data.path to that folder",
    ),
    **dict.fromkeys(
        f"ipynb {_BINARY}".split(), "write the text itself into .txt files, or tokens into .npy files"
    ),
}
"""Advice by the suffix of a file that is not plain text."""
_PACKING = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_IMAGES = {b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG"}
_STORED = {b"PK\x03\x04": "zip", b"PAR1": "Parquet", b"ARROW1": "Arrow", b"%PDF": "PDF"}
_MAGIC = _PACKING | _STORED | _IMAGES
_SNIFFED = 1 << 16


@dataclass(frozen=True)
class DataFiles:
    """The files of the data.

    Attributes:
        root: the folder, or the file itself.
        paths: the files, sorted by name; of a folder that ``datasets`` saved, that folder.
        format: ``text`` (which includes ``tokens``) or ``datasets``.
    """

    root: Path
    paths: tuple[Path, ...]
    format: str

    def name_of(self, path: Path) -> str:
        """Return a file's name relative to the root; bytes that are no UTF-8 are written as ``\\xNN``."""
        name = path.name if path == self.root else path.relative_to(self.root).as_posix()
        return os.fsencode(name).decode("utf-8", "backslashreplace")


def find_files(config: DataConfig, key: str = "data.path") -> DataFiles:
    """Find the files of the data and their format.

    Args:
        key: key of the path, for messages (default ``data.path``).
    """
    if not config.path:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [p for p in _below(root, "*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts)]
        return DataFiles(root, tuple(files), "text")
    root = Path(config.path).expanduser()
    saved = os.path.isdir(root) and any(os.path.isfile(root / name) for name in _DATASET_FILES)
    if config.format == "datasets" or (saved and config.format == "auto"):
        if not saved:
            raise DataError(
                f"{root} is not a folder that `datasets` saved: it has no {' and no '.join(_DATASET_FILES)}"
            )
        return DataFiles(root, (root,), "datasets")
    paths = _below(root, config.pattern, key)
    if config.format != "auto":
        return DataFiles(root, tuple(paths), "text")
    for path in paths:
        if path.suffix != ".npy":
            _require_text(path)
    return DataFiles(root, tuple(paths), "text")


def _require_text(path: Path) -> None:
    """Raise if a file's suffix or content tells that it is not plain text."""
    suffix = path.suffix.lower()
    if (hint := _HINTS.get(suffix.removeprefix("."))) is not None:
        raise DataError(
            f"{path} is a {suffix} file, which is not understood: its bytes would be trained on as text; {hint}. "
            "data.pattern chooses files of a folder, and data.format=text takes them as they are"
        )
    with os_errors_as(DataError, f"cannot read {path}"):
        descriptor = open_regular(path)
        try:
            head = os.pread(descriptor, _SNIFFED, 0)
        finally:
            os.close(descriptor)
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    if kind is None and b"\0" in head:
        kind = "binary"
    if kind is not None:
        raise DataError(
            f"{path} is a {kind} file and no text; data.pattern chooses files of a folder, and data.format=text takes its "
            "bytes as they are"
        )
    lines = [line for line in head.splitlines()[:3] if line.strip()][:2]
    if lines and all(_is_object(line) for line in lines):
        raise DataError(
            f"{path} has JSON objects as lines; {_HINTS['jsonl']}, or set data.format=text to train on braces and keys, too"
        )


def _is_object(line: bytes) -> bool:
    try:
        return line.lstrip().startswith(b"{") and isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _below(root: Path, pattern: str, key: str = "data.path") -> list[Path]:
    """Return the file `root` itself, or the matching files below it, sorted by name and without hidden ones."""
    if os.path.isfile(root):
        return [root]
    if not os.path.isdir(root):
        raise DataError(f"there is no file or folder {root}; {key} must name one")
    paths = []
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(folder, n) for n in fnmatch.filter(names, pattern) if not n.startswith(".")]
    if not paths:
        raise DataError(f"no file in {root} matches {pattern!r}; see {key} and data.pattern")
    return sorted(paths)


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"cannot read the folder {error.filename}: {error.strerror}") from error
