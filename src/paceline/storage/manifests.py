"""Manifests: reading and writing. A directory becomes a model or snapshot with its manifest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from paceline.errors import ModelError
from paceline.storage.checked_files import read_manifest_text
from paceline.storage.durable_io import replace_synced, sync_directory
from paceline.storage.format import VERSION, Manifest
from paceline.transport import register_type

MANIFEST: Final = "manifest.json"
_Manifest = TypeVar("_Manifest", bound=Manifest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Publish a manifest. Its files, whose contents are on disk already, become a model or snapshot.

    The file names are synced first, so that a manifest never survives a crash without its files. After an OSError the
    previous manifest remains. To make the rename itself durable, the caller syncs the folder.
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
            f"{path} has format version {version}, this Paceline reads {VERSION}: "
            f"use Paceline {fields.get('paceline')}, which wrote it"
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
    """Return a manifest's raw fields. Raises ModelError unless it has this kind; the version may differ."""
    path = folder / MANIFEST
    try:
        fields = json.loads(read_manifest_text(path))
    except NotADirectoryError:
        raise ModelError(
            f"{folder} is a file, and {kind.NAME} is a directory that 'paceline train' wrote (for a data file, use "
            "'paceline describe')"
        ) from None
    except FileNotFoundError:
        raise ModelError(f"{folder} {kind.ABSENT}: it has no {MANIFEST}") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != kind.FORMAT:
        raise ModelError(f"{path} is not a manifest of {kind.NAME}")
    return fields


def digest_of(fields: dict[str, Any]) -> str:
    """Return the checksum of a manifest's fields without the checksum itself."""
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()
