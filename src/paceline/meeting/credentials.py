"""The token with which the ranks of a program authenticate each other: a given token, or one made from a user's key.

Without ``PACELINE_TOKEN``, the ranks on one machine use a random key in a file that only their user can read. Other
users cannot guess the key. Processes of this user can read it, but they could read the memory of the ranks too.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from paceline.errors import UsageError
from paceline.output_files import USER_FOLDER
from paceline.transport.security.authentication import check_token, join_fields

_FILE: Final = "key"
_KEY_BYTES: Final = 32


def choose_secret(token: str | None, *, is_local: bool, where: str, runtime_dir: Path | None) -> str:
    """Return the given token. Without one, derive a token from the user's key if all ranks are on this machine.

    ``where`` is the address of the rendezvous, for error messages. ``runtime_dir`` is ``XDG_RUNTIME_DIR``. Without a
    token, raises UsageError if ranks on other machines may take part, or if there is no folder for the key.
    """
    if token is not None:
        return check_token(token, "the token (default: PACELINE_TOKEN)")
    if is_local:
        return derive_token(user_key(runtime_dir).hex(), "the ranks of one machine")
    raise UsageError(
        f"the ranks meet at {where}, which other machines can reach, and have no token for authentication; set "
        "PACELINE_TOKEN to the same secret on every rank"
    )


def derive_token(secret: str, *context: str) -> str:
    """Return a token of 64 hex digits, which only processes with ``secret`` can compute. It depends on ``context``."""
    text = join_fields(b"paceline", *(part.encode() for part in context))
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def user_key(runtime_dir: Path | None = None) -> bytes:
    """Return the key of this user on this machine, and create it at the first use.

    The folder and the file must belong to this user, and other users must not have access, so that they cannot write a
    key of their own. Raises UsageError if there is no folder for the key.
    """
    return _key_in(tuple(folders(runtime_dir)))


def job_token(job: str) -> str:
    """Return a token for a job on several machines that share the user's home folder. It depends on the name `job`.

    Raises UsageError if the user has no home folder.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    return derive_token(_key_in((_home(user) / USER_FOLDER,)).hex(), "job", job)


def _key_in(places: Sequence[Path]) -> bytes:
    """Return the key in the first of the folders that is private. Create the folder and the key if they are missing."""
    for folder in places:
        try:
            folder.mkdir(mode=0o700, parents=folder.parts[-2:] == USER_FOLDER.parts, exist_ok=True)
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and _is_private(found):
                return _read_or_make(folder)
        except OSError:
            continue
    raise UsageError(
        "the ranks have no token, and there is no folder for a private key of this user "
        f"(tried {', '.join(map(str, places))}); set PACELINE_TOKEN to the same secret on every "
        "rank"
    )


def folders(runtime_dir: Path | None) -> Iterator[Path]:
    """Yield the possible folders for the key, in the order in which all ranks of a machine try them."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    if runtime_dir is not None:
        yield runtime_dir / "paceline"
    yield Path(f"/run/user/{user}/paceline")
    with contextlib.suppress(ImportError, KeyError, RuntimeError):
        yield _home(user) / USER_FOLDER
    yield Path(tempfile.gettempdir()) / f"paceline-{user}"


def _home(user: int) -> Path:
    import pwd

    return Path(pwd.getpwuid(user).pw_dir)


def _is_private(found: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o077)


def _read_or_make(folder: Path) -> bytes:
    path = folder / _FILE
    if not path.exists():
        fresh = folder / f"{_FILE}.{os.getpid()}.{secrets.token_hex(4)}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another process has created a key first, which is used
                os.link(fresh, path)
        finally:
            fresh.unlink()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    with open(descriptor, "rb") as file:
        if not _is_private(os.fstat(descriptor)):
            raise UsageError(f"the key {path} is readable by other users or belongs to another user; remove it")
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise UsageError(f"the key {path} has {len(key)} bytes, expected {_KEY_BYTES}; remove it")
    return key
