"""Define the format on disk: manifests of models and snapshots.

Rows are stored by key, not by server. They are in parts: safetensors files of `keys` and `records`. A manifest names
each table's parts with sizes and checksums. Other files are ignored. A manifest is untrusted, so its names must be
plain names, and its numbers have limits.

In addition to tables, the manifests of models and of snapshots have their own fields (:class:`ModelManifest`,
:class:`SnapshotManifest`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from paceline.errors import ModelError, UsageError
from paceline.protocol.bounds import Natural
from paceline.protocol.jobs import JobAccount
from paceline.storage.durable_io import read_manifest_text, replace_synced, sync_directory
from paceline.tables.bounds import Bucket, Sha256, Words
from paceline.tables.spec import TableSpec
from paceline.transport import register_type
from paceline.version import __version__

MANIFEST: Final = "manifest.json"
_Manifest = TypeVar("_Manifest", bound="Manifest")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest, which turns its files into a model or a snapshot. The files' contents must be on disk already.

    The file names are synced first, so that a manifest never survives a crash without its files. After an OSError the
    previous manifest remains. The caller must sync the folder.
    """
    sync_directory(folder)
    fields = msgspec.to_builtins(manifest)
    fields["sha256"] = digest_of(fields)
    replace_synced(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(fields), indent=1))


def read_manifest(folder: Path, kind: type[_Manifest]) -> _Manifest:
    """Read the manifest of a model or a snapshot. Raises ModelError if it is missing or damaged."""
    path = folder / MANIFEST
    fields = read_fields(folder, kind)
    version, digest = fields.get("version"), fields.pop("sha256", None)
    if version != VERSION:
        raise ModelError(
            f"{path} has format version {version}, but this Paceline reads {VERSION}. "
            f"Use Paceline {fields.get('paceline')}, which wrote the file"
        )
    try:
        manifest = msgspec.convert(fields, register_type(kind))
        found = digest_of(fields)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None
    if found != digest:
        raise ModelError(f"{path} is damaged: its SHA-256 is {found[:16]}…, it records {str(digest)[:16]}…")
    return manifest


def read_fields(folder: Path, kind: type[Manifest]) -> dict[str, Any]:
    """Return a manifest's fields, of any version. Raises ModelError if the manifest is of another kind."""
    path = folder / MANIFEST
    try:
        fields = json.loads(read_manifest_text(path))
    except NotADirectoryError:
        raise ModelError(
            f"{folder} is a file, but {kind.NAME} is a directory written by 'paceline train' (for a data file, use "
            "'paceline describe')"
        ) from None
    except FileNotFoundError:
        problem = f"{kind.ABSENT}: it has no {MANIFEST}" if folder.exists() else "does not exist"
        raise ModelError(f"{folder} {problem}") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != kind.FORMAT:
        raise ModelError(f"{path} is not a manifest of {kind.NAME}")
    return fields


def digest_of(fields: dict[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()


VERSION: Final = 2

FileName: TypeAlias = Annotated[str, Meta(pattern=r"^(snapshot-\d{6,19}/)?\w[\w.-]{0,200}\Z")]
"""A file in a model's directory, or in a snapshot's folder within a directory of snapshots."""
FolderName: TypeAlias = Annotated[str, Meta(pattern=r"^snapshot-\d{6,19}\Z")]
Directory: TypeAlias = Annotated[str, Meta(pattern=r"^(/|[A-Za-z]:)[^\0]*\Z", max_length=4096)]


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a model or a snapshot."""

    file: FileName
    num_bytes: Natural
    sha256: Sha256


class StoredPart(StoredFile, frozen=True, kw_only=True):
    """A file with rows of a table: `keys` uint64 [n] and `records` float32 [n, words] (values, then the rule's state).

    A snapshot's part has one bucket after another. A model's part has no `buckets`, and a single number of rows.
    """

    table: str
    buckets: tuple[Bucket, ...] = ()
    rows: tuple[Natural, ...]
    words: Words
    """Number of float32 per record, including the number of the pass if there is one."""
    has_passes: bool = False
    """Whether a record ends with the number of the pass over the data in which its row was last pushed."""

    def __post_init__(self) -> None:
        is_divided = len(self.buckets) == len(self.rows) and len(set(self.buckets)) == len(self.buckets)
        if not is_divided and (self.buckets or len(self.rows) != 1):
            raise UsageError(f"{self.file} has {len(self.buckets)} buckets, but numbers of rows for {len(self.rows)}")
        if self.num_rows * (8 + 4 * self.words) > self.num_bytes:
            raise UsageError(f"{self.file} cannot hold {self.num_rows} rows of {self.words} words")

    @property
    def num_rows(self) -> int:
        return sum(self.rows)


class PartUse(msgspec.Struct, frozen=True, kw_only=True):
    """A part, and its buckets that belong to the manifest. Other buckets may be in newer parts."""

    part: StoredPart
    buckets: tuple[Bucket, ...] = ()

    def __post_init__(self) -> None:
        if not set(self.buckets) <= set(self.part.buckets):
            raise UsageError(f"{self.part.file} lacks buckets that the manifest uses")


class StoredTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table on disk. Each bucket is used from at most one part."""

    spec: TableSpec
    rows: Natural
    uses: tuple[PartUse, ...]

    def __post_init__(self) -> None:
        used = [bucket for use in self.uses for bucket in use.buckets]
        if len(set(used)) != len(used):
            raise UsageError(f"table {self.spec.name!r} has a bucket twice")
        for part in self.parts:
            if part.words != self.spec.record_words + part.has_passes:
                raise UsageError(f"{part.file} has records of {part.words} float32, table {self.spec} has others")

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        return tuple(use.part for use in self.uses)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Common fields of models and snapshots."""

    FORMAT: ClassVar[str]
    NAME: ClassVar[str]
    """The noun for the manifest's subject in errors."""
    ABSENT: ClassVar[str]
    """The text of the error if a folder has no manifest."""

    format: str
    version: int = VERSION
    paceline: str = __version__
    tables: tuple[StoredTable, ...]

    @property
    def files(self) -> set[str]:
        return {part.file for table in self.tables for part in table.parts}


class ModelManifest(Manifest, frozen=True, kw_only=True):
    """A model, or a checkpoint of a PyTorch program. The program that writes it describes it in `model`."""

    FORMAT: ClassVar[str] = "paceline-model"
    NAME: ClassVar[str] = "a Paceline model"
    ABSENT: ClassVar[str] = "holds no model"

    format: str = FORMAT
    tensors: dict[str, StoredFile] = {}
    """The files of named tensors, by their owner: a PyTorch model or its optimizer."""
    model: dict[str, Any] = {}

    @property
    def files(self) -> set[str]:
        return super().files | {tensor.file for tensor in self.tensors.values()}


class SnapshotManifest(Manifest, frozen=True, kw_only=True):
    """A snapshot of a cluster: progress and description of a training run."""

    FORMAT: ClassVar[str] = "paceline-snapshot"
    NAME: ClassVar[str] = "a snapshot"
    ABSENT: ClassVar[str] = "is not a complete snapshot"

    format: str = FORMAT
    number: Natural
    full: bool
    """Whether the snapshot uses no part of an earlier snapshot."""
    iteration: Natural | None
    """Under sequential consistency, the number of completed iterations of the run. Otherwise None: buckets
    are copied one after another, so only each single bucket is consistent.
    """
    account: JobAccount | None = None
    training: dict[str, Any] = {}
