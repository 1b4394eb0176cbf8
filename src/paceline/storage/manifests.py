"""Manifests written and read: a directory is a model or a snapshot from the moment its manifest is in place."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from paceline.errors import ModelError
from paceline.storage.checked_files import read_manifest_text
from paceline.storage.durable_io import replace_synced, sync_directory
from paceline.storage.format import VERSION, Manifest, ModelManifest
from paceline.storage.version_1 import ModelManifest1
from paceline.transport import known

MANIFEST: Final = "manifest.json"
_READABLE = (1, VERSION)
_Manifest = TypeVar("_Manifest", bound=Manifest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put a manifest in place: its files, whose contents are on the disk by now, are a model or snapshot from now on.

    Their names are made to last first: no manifest outlasts a crash that names files which did not. Raises OSError, and
    then the manifest that was there before is in place. Who must know that the rename outlasts a crash of the machine
    syncs the folder.
    """
    sync_directory(folder)
    fields = msgspec.to_builtins(manifest)
    fields["sha256"] = digest_of(fields)
    replace_synced(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(fields), indent=1))


def read_manifest(folder: Path, kind: type[_Manifest]) -> _Manifest:
    """Read the manifest of a model or a snapshot. Raises ModelError if there is none of that kind, or it is damaged."""
    path = folder / MANIFEST
    fields = read_fields(folder, kind)
    version, digest = fields.get("version"), fields.pop("sha256", None)
    if version not in _READABLE:
        raise ModelError(
            f"{path} has format version {version}, this Paceline reads {' and '.join(map(str, _READABLE))}: "
            f"use Paceline {fields.get('paceline')}, which wrote it"
        )
    try:
        if version == 1 and kind is ModelManifest:  # it has no checksum of its own
            return cast(_Manifest, msgspec.convert(fields, known(ModelManifest1)).upgrade())
        manifest = msgspec.convert(fields, known(kind))
        found = digest_of(fields)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None
    if found != digest:
        raise ModelError(f"{path} is damaged: its SHA-256 is {found[:16]}…, it says {str(digest)[:16]}…")
    return manifest


def read_fields(folder: Path, kind: type[Manifest]) -> dict[str, Any]:
    """Return a manifest's fields as they stand there. Raises ModelError if it is none of that kind, of any version."""
    path = folder / MANIFEST
    try:
        fields = json.loads(read_manifest_text(path))
    except NotADirectoryError:
        raise ModelError(
            f"{folder} is a file, and {kind.NAME} is a directory that 'paceline train' wrote (of data, 'paceline "
            "describe' says what is in it)"
        ) from None
    except FileNotFoundError:
        raise ModelError(f"{folder} {kind.ABSENT}: there is no {MANIFEST} in it") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != kind.FORMAT:
        raise ModelError(f"{path} is no manifest of {kind.NAME}")
    return fields


def digest_of(fields: dict[str, Any]) -> str:
    """Return the checksum of a manifest's fields, its own aside."""
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()
