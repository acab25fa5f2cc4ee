"""Store images in shards: a few large ArrayRecord files, with a manifest for each split.

A shard's first record describes its source files, and its last record lists the labels. All other
records are images: a checksum, a JSON text (name, label, sizes) and the image, encoded or as
pixels. Item i of the shards is item i of the original folder, so that order, resume and
distribution over ranks do not change.
"""

import bisect
import hashlib
import io
import itertools
import json
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tresnet.data.folder import ImageDataset, open_picture
from tresnet.data.pictures import BadImageError, Picture, Pixels, named
from tresnet.errors import ConfigError, DataError, TResNetError, needed
from tresnet.files import atomic_write, explained, lock, remove_leftovers, write_text
from tresnet.settings import ShardSettings
from tresnet.settings.fields import check, option

FORMAT = 2
_HEAD = struct.Struct("<II")  # CRC-32 of all later bytes, and length of the JSON text in bytes


class ShardDataset(ImageDataset):
    """One split stored in shards. Each record is checked when read. `digest` hashes all images."""

    def __init__(
        self,
        folder: Path,
        split: str,
        transform: Callable[[Picture], Any] | None = None,
        skip_bad_images: bool = False,
    ) -> None:
        """Read the manifest and the files' sizes, or raise DataError."""
        _library()
        manifest = manifest_path(folder, split)
        try:
            known = json.loads(manifest.read_text(encoding="utf-8"))
            if known["format"] != FORMAT:
                raise ValueError(f"format {known['format']}, this version reads {FORMAT}")
            counts = [int(shard["images"]) for shard in known["shards"]]
            files = [folder / str(shard["file"]) for shard in known["shards"]]
            sizes = [int(shard["bytes"]) for shard in known["shards"]]
            classes = [str(name) for name in known["classes"]]
            labels, self.digest = known["labels"], str(known["digest"])
            if not labels:
                raise ValueError("no images")
            if len(labels) != sum(counts):
                raise ValueError(f"{len(labels)} labels of {sum(counts)} images")
            targets = _targets(labels, len(classes), bool(known["multilabel"]))
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(
                f"expected the manifest of shards in {manifest}, got {type(error).__name__}: "
                f"{error}: write them again with `tresnet shard`"
            ) from error
        for file, size in zip(files, sizes, strict=True):
            found = file.stat().st_size if file.is_file() else "no file"
            if found != size:
                raise DataError(
                    f"expected {size} bytes in {file}, got {found}: write the shards again, "
                    "complete ones are kept"
                )
        _reader.cache_clear()  # the files may have been replaced
        self._places = _Places(files, counts)
        super().__init__(split, classes, self._places, targets, transform, skip_bad_images)

    def picture(self, index: int) -> Picture:
        """Read an image without decoding it, or raise BadImageError if its record is damaged."""
        file, number = self._places.place(index)
        path = f"{file}[{number}]"
        with named(path):
            about, data = _unpack(_reader(str(file), os.getpid()).read([number + 1])[0])
            if about["label"] != (label := _stored(self.targets[index])):
                raise BadImageError(
                    path,
                    f"expected label {label}, as in the manifest, got {about['label']}: this file "
                    "belongs to another data set or manifest, write the shards again",
                )
            if "pixels" in about:
                return Pixels(data, about["pixels"])
            return Picture(data, f"{path} ({about['name']})", about["plain"])


class _Places(Sequence[str]):
    """Paths of the images, made on demand: a list of 20 million paths would take gigabytes."""

    def __init__(self, files: list[Path], counts: list[int]) -> None:
        self._files = files
        self._ends = list(itertools.accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, index: int) -> tuple[Path, int]:
        shard = bisect.bisect_right(self._ends, index)
        return self._files[shard], index - (self._ends[shard - 1] if shard else 0)

    def __getitem__(self, index: Any) -> Any:
        file, number = self.place(range(len(self))[index])
        return f"{file}[{number}]"


def manifest_path(folder: Path, split: str) -> Path:
    """Return the path of a split's manifest; a folder with this file contains shards."""
    return folder / f"{split}.shards.json"


def write_shards(
    dataset: ImageDataset,
    root: Path,
    out: Path,
    settings: ShardSettings,
    *,
    workers: int = 1,
    log: Callable[[str], object] = lambda line: None,
) -> dict[str, str]:
    """Write one split into `out`, read all shards back, then write the manifest.

    A complete shard in `out` is kept if its source files and settings are unchanged, so that a
    stopped command can continue. Other shards of an earlier command are removed. Stored names are
    relative to `root`. `log` gets a line for each shard. The result maps names of skipped images to
    reasons.

    Raises:
        ConfigError: a setting is out of range, or `out` has shards written with other settings.
        BusyError: another process is writing to `out`.
        DataError: an image cannot be decoded, or all images were skipped.
        WriteError: a file cannot be written, for example because the disk is full.
    """
    check(settings)
    if settings.max_side is not None and settings.short_side is not None:
        raise ConfigError("expected --max-side or --short-side, got both: leave one out")
    _library()
    with explained(out):
        out.mkdir(parents=True, exist_ok=True)
    size = settings.images_per_shard
    jobs = []
    for number, begin in enumerate(range(0, len(dataset), size)):
        rows = [
            (os.path.relpath(dataset.paths[i], root), _stored(dataset.targets[i]))
            for i in range(begin, min(begin + size, len(dataset)))
        ]
        file = out / f"{dataset.split}-{number:05d}.array_record"
        jobs.append(_ShardJob(file, root, rows, settings, dataset.skip_bad_images))
    shards: list[dict[str, Any]] = []
    labels: list[Any] = []
    skipped: dict[str, str] = {}
    digest = hashlib.sha256()
    with lock(out):
        remove_leftovers(out)
        _check_settings(manifest_path(out, dataset.split), asdict(settings))
        manifest_path(out, dataset.split).unlink(missing_ok=True)
        workers = min(workers, len(jobs))
        processes = 0 if workers == 1 else workers
        for done in DataLoader(_Written(jobs), batch_size=None, num_workers=processes):
            if isinstance(done, TResNetError):
                raise done
            left_out = f", {len(done.skipped)} left out" if done.skipped else ""
            log(f"{done.file}: {len(done.labels)} images{left_out}{', kept' * done.kept}")
            size = done.file.stat().st_size
            shards.append({"file": done.file.name, "images": len(done.labels), "bytes": size})
            labels += done.labels
            skipped |= done.skipped
            digest.update(done.digest.encode())
        if not labels:
            raise DataError(f"expected images in {root}, but none of {len(dataset)} can be read")
        content = {
            "format": FORMAT,
            "classes": dataset.classes,
            "multilabel": dataset.multi,
            "settings": asdict(settings),
            "shards": shards,
            "labels": labels,
            "skipped": skipped,
            "digest": digest.hexdigest(),
        }
        write_text(manifest_path(out, dataset.split), json.dumps(content))
        for file in out.glob(f"{dataset.split}-*.array_record"):
            number = file.stem.removeprefix(f"{dataset.split}-")
            if number.isdigit() and int(number) >= len(jobs):
                file.unlink()  # an earlier command made more shards
    return skipped


def _check_settings(manifest: Path, settings: dict[str, Any]) -> None:
    """Raise ConfigError if the shards of `manifest` were written with other settings."""
    try:
        before = json.loads(manifest.read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError, TypeError):  # there is no readable manifest
        return
    names = settings.keys() - {"images_per_shard"}  # this setting changes no image
    if differing := sorted(name for name in names if before.get(name) != settings[name]):
        raise ConfigError(
            f"{manifest.parent} holds shards that were written with other "
            f"{', '.join(map(option, differing))}: write to another folder, or delete that one"
        )


@dataclass(frozen=True)
class _ShardJob:
    file: Path
    root: Path
    rows: list[tuple[str, Any]]
    settings: ShardSettings
    skip_bad_images: bool

    def source(self) -> str:
        """Return JSON for the first record. Its sizes and times show if source files changed."""
        rows = []
        for name, label in self.rows:
            try:
                status = os.stat(self.root / name)
                rows.append([name, label, status.st_size, status.st_mtime_ns])
            except OSError:  # `_write` will report the unreadable file
                rows.append([name, label, None, None])
        return json.dumps({"format": FORMAT, "rows": rows, "settings": asdict(self.settings)})


@dataclass(frozen=True)
class _Done:
    file: Path
    labels: list[Any]
    skipped: dict[str, str]
    digest: str
    kept: bool = False


class _Written(torch.utils.data.Dataset["_Done | TResNetError"]):
    """Data set whose item i writes shard i, so that a loader's workers write shards."""

    def __init__(self, jobs: list[_ShardJob]) -> None:
        self._jobs = jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, index: int) -> "_Done | TResNetError":
        try:
            return _write(self._jobs[index])
        except TResNetError as error:  # if raised, torch would turn the error into text
            return error


def _write(job: _ShardJob) -> _Done:
    source = job.source()
    if (found := _read_back(job.file, source)) and (job.skip_bad_images or not found.skipped):
        return _Done(**{**vars(found), "kept": True})
    labels: list[Any] = []
    skipped: dict[str, str] = {}
    with atomic_write(job.file) as place:
        # Write chunks of one image, uncompressed: images are read one by one and hardly compress.
        writer = _library().ArrayRecordWriter(str(place), "group_size:1,uncompressed")
        try:
            writer.write(_pack({"source": source}, b""))
            for name, label in job.rows:
                try:
                    picture = open_picture(job.root / name)
                    form, data = _shrunk(picture, job.settings)
                except BadImageError as error:
                    if not job.skip_bad_images:
                        raise DataError(
                            f"{error}, or leave such files out with --skip-bad-images"
                        ) from error
                    skipped[name] = error.reason
                    continue
                about = {"name": name, "label": label, "size": picture.size}
                writer.write(_pack(about | form, data))
                labels.append(label)
            writer.write(_pack({"labels": labels, "skipped": skipped}, b""))
        finally:
            writer.close()
        found = _read_back(place, source)
        if found is None or found.labels != labels:
            raise DataError(f"{job.file} does not hold what was written to it: is the disk sound?")
    return _Done(job.file, labels, skipped, found.digest)


def _read_back(file: Path, source: str) -> _Done | None:
    """Check a shard; return None if it is missing, damaged or made from another `source`."""
    if not file.is_file():
        return None
    digest = hashlib.sha256()
    try:
        reader = _library().ArrayRecordReader(str(file), "readahead_buffer_size:0")
        count = reader.num_records()
        first, last = (_unpack(reader.read([i])[0])[0] for i in (0, count - 1))
        if first["source"] != source or count != len(last["labels"]) + 2:
            return None
        for number in range(1, count - 1):
            record = reader.read([number])[0]
            _unpack(record)
            digest.update(record)
        return _Done(file, last["labels"], last["skipped"], digest.hexdigest())
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError, OSError, struct.error):
        return None


def _shrunk(picture: Picture, settings: ShardSettings) -> tuple[dict[str, Any], bytes]:
    """Return metadata and the bytes to store: RGB pixels, a smaller JPEG or the source file."""
    from PIL import Image

    width, height = picture.size
    image = picture.rgb()  # also checks that the complete image can be decoded
    factor = 1.0
    if settings.max_side is not None:
        factor = settings.max_side / max(width, height)
    elif settings.short_side is not None:
        factor = settings.short_side / min(width, height)
    data = picture.data
    if factor < 1:
        size = (max(1, round(width * factor)), max(1, round(height * factor)))
        image = image.resize(size, Image.Resampling.LANCZOS)
    if settings.pixels:
        return {"pixels": image.size}, image.tobytes()
    if factor < 1:
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=settings.quality)
        data = stream.getvalue()
    return {"plain": Picture(data, "").plain_size()}, data


def _stored(target: torch.Tensor) -> int | list[int]:
    return target.nonzero().flatten().tolist() if target.dim() else int(target)


def _targets(labels: list[Any], classes: int, multilabel: bool) -> torch.Tensor:
    if not multilabel:
        targets = torch.tensor(labels, dtype=torch.int64)
        if targets.dim() != 1 or not (0 <= int(targets.min()) <= int(targets.max()) < classes):
            raise ValueError(f"a label outside the {classes} classes")
        return targets
    targets = torch.zeros(len(labels), classes, dtype=torch.uint8)
    for row, numbers in enumerate(labels):
        targets[row, numbers] = 1
    return targets


def _pack(about: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(about).encode()
    length = struct.pack("<I", len(text))
    return struct.pack("<I", zlib.crc32(length + text + data)) + length + text + data


def _unpack(record: bytes) -> tuple[dict[str, Any], bytes]:
    checksum, length = _HEAD.unpack_from(record)
    if zlib.crc32(memoryview(record)[4:]) != checksum:
        raise ValueError("its checksum differs from its content")
    begin = _HEAD.size + length
    return json.loads(record[_HEAD.size : begin]), record[begin:]


@lru_cache(maxsize=256)  # each entry keeps a file open; many systems allow 1024 open files
def _reader(file: str, process: int) -> Any:
    """Return a file's reader. Each process needs its own, because threads do not survive a fork."""
    return _library().ArrayRecordReader(file, "readahead_buffer_size:0,max_parallelism:0")


def _library() -> Any:
    with needed("a data set in shards", "shards"):
        return import_module("array_record.python.array_record_module")
