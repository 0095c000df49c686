"""Formats of data files: found by name and content, and refused where they are not understood."""

from __future__ import annotations

import fnmatch
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.base.bounded_io import open_regular, parse_json
from penstock.base.errors import DataError
from penstock.train.config.sections.data_section import DataConfig
from penstock.train.data.records.record_files import DATASET_FILES

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_BY_SUFFIX = {
    ".npy": "tokens",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
RECORDS = ("jsonl", "parquet", "datasets")
"""Formats of records; the other formats are one sequence of tokens."""

_PACKED = "zip tar tgz gz bz2 xz zst 7z rar lz4 lzma"
_TABLES = "csv tsv xls xlsx ods orc avro feather tfrecord db sqlite"
_BINARY = (
    "npz pkl pickle pt pth ckpt bin safetensors gguf onnx h5 hdf5 mat msgpack pdf doc docx odt ppt pptx epub png jpg jpeg "
    "gif webp bmp tiff ico mp3 wav flac ogg mp4 mkv mov avi exe dll so o a pyc class jar whl"
)
_HINTS = {
    **dict.fromkeys(_PACKED.split(), "unpack it first"),
    **dict.fromkeys(
        _TABLES.split(),
        "write its rows as .jsonl or .parquet (pandas: to_json(orient='records', lines=True))",
    ),
    "json": "write one object a line into a .jsonl file (jq -c '.[]' FILE.json > FILE.jsonl)",
    "geojson": "write the text itself into .txt or .jsonl files",
    "ipynb": "write the text itself into .txt or .jsonl files",
    "arrow": "set data.path to the folder with dataset_info.json that `datasets` saved, or write a .parquet file",
    **dict.fromkeys(
        _BINARY.split(), "write the text itself into .txt or .jsonl files, or tokens into .npy files"
    ),
}
"""Advice by the suffix of a file that is not plain text."""
_MAGIC = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip",
    b"PAR1": "Parquet", b"ARROW1": "Arrow", b"%PDF": "PDF", b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG",
}  # fmt: skip
_SNIFFED = 1 << 16
_SPLITS = {"test", "tests", "validation", "valid", "val", "dev", "eval"}


@dataclass(frozen=True)
class DataFiles:
    root: Path
    paths: tuple[Path, ...]
    format: str

    def name_of(self, path: Path) -> str:
        """Return a file's name relative to the root; bytes that are no UTF-8 are written as ``\\xNN``."""
        name = path.name if path == self.root else path.relative_to(self.root).as_posix()
        return os.fsencode(name).decode("utf-8", "backslashreplace")


def find_files(config: DataConfig, key: str = "data.path") -> DataFiles:
    """Find the files of a source and their format."""
    if not config.path:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [p for p in _below(root, "*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts)]
        return DataFiles(root, tuple(files), "text")
    root = Path(config.path).expanduser()
    saved = os.path.isdir(root) and any(os.path.isfile(root / name) for name in DATASET_FILES)
    if config.format == "datasets" or (saved and config.format == "auto"):
        if not saved:
            raise DataError(
                f"{root} is not a folder that `datasets` saved: it has no {' and no '.join(DATASET_FILES)}"
            )
        return DataFiles(root, (root,), "datasets")
    paths = _below(root, config.pattern, key)
    if config.format != "auto":
        return DataFiles(root, tuple(paths), "text" if config.format == "tokens" else config.format)
    formats: dict[str, list[Path]] = {}
    for path in paths:
        formats.setdefault(_format_of(path), []).append(path)
    texts = formats.pop("text", []) + formats.pop("tokens", [])
    if not formats:
        for path in texts:
            if path.suffix != ".npy":
                _require_plain(path)
        return DataFiles(root, tuple(paths), "text")
    if texts or len(formats) > 1:
        examples = [texts[0]] * bool(texts) + [group[0] for group in formats.values()]
        raise DataError(
            f"{root} has files of several formats ({' and '.join(path.name for path in examples)}); set data.pattern to "
            f"those to train on, such as '*{examples[-1].suffix}', or make each a source of its own in data.sources"
        )
    _require_one_split(root, paths, config.pattern)
    return DataFiles(root, tuple(paths), next(iter(formats)))


def _format_of(path: Path) -> str:
    suffix = path.suffix.lower()
    if (hint := _HINTS.get(suffix.removeprefix("."))) is not None:
        raise DataError(
            f"{path} is a {suffix} file, which is not understood: its bytes would be trained on as text; {hint}. "
            "data.pattern chooses files of a folder, and data.format=text takes them as they are"
        )
    return _BY_SUFFIX.get(suffix, "text")


def _require_plain(path: Path) -> None:
    """Raise if a file without a telling name is binary or JSON."""
    try:
        descriptor = open_regular(path)
        try:
            head = os.pread(descriptor, _SNIFFED, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
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
            f"{path} has JSON objects as lines; set data.format=jsonl to read them as records, or data.format=text to train "
            "on their braces and keys, too"
        )


def _is_object(line: bytes) -> bool:
    try:
        return line.lstrip().startswith(b"{") and isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _require_one_split(root: Path, paths: Sequence[Path], pattern: str) -> None:
    """Raise if a folder has files for training and others for tests, and the pattern does not say which."""
    if pattern != "*":
        return
    first = {path: path.stem.lower().replace("_", "-").replace(".", "-").split("-")[0] for path in paths}
    train = next((path for path, word in first.items() if word == "train"), None)
    other = next((path for path, word in first.items() if word in _SPLITS), None)
    if train is not None and other is not None:
        raise DataError(
            f"{root} has files of several splits ({train.name} and {other.name}); set data.pattern to those to train on, "
            f"such as 'train*{train.suffix}', and data.held_out_path to those to evaluate on"
        )


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
