"""The shared key of ranks without a token."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.meeting import credentials
from paceline.meeting.credentials import choose_secret, derive_token, user_key


@pytest.fixture(autouse=True)
def only_test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Search for keys only in the folders of the test."""
    monkeypatch.setattr(
        credentials, "folders", lambda runtime_dir: iter([runtime_dir / "paceline", tmp_path / "last" / "paceline"])
    )


def test_the_first_process_makes_a_key_and_all_other_processes_find_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda _: user_key(tmp_path), range(32)))
    assert len(set(keys)) == 1
    assert len(keys[0]) == 32
    (file,) = (tmp_path / "paceline").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_folder_open_to_other_users_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir()
    (tmp_path / "paceline").mkdir(mode=0o755)
    user_key(tmp_path)
    assert not list((tmp_path / "paceline").iterdir())
    assert list((tmp_path / "last" / "paceline").iterdir())


def test_a_folder_behind_a_symbolic_link_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "paceline").symlink_to(tmp_path / "elsewhere")
    user_key(tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can change the owner of a file")
def test_a_folder_of_another_user_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "paceline").mkdir(mode=0o700)
    (tmp_path / "paceline" / "key").write_bytes(bytes(32))
    os.chown(tmp_path / "paceline", 12345, 12345)
    with pytest.raises(UsageError, match="set PACELINE_TOKEN"):
        user_key(tmp_path)


def test_a_key_readable_by_other_users_is_refused(tmp_path: Path) -> None:
    user_key(tmp_path)
    (tmp_path / "paceline" / "key").chmod(0o644)
    with pytest.raises(UsageError, match="readable by other users"):
        user_key(tmp_path)


def test_a_truncated_key_is_refused(tmp_path: Path) -> None:
    user_key(tmp_path)
    (tmp_path / "paceline" / "key").write_bytes(b"")
    with pytest.raises(UsageError, match="has 0 bytes, expected 32; remove it"):
        user_key(tmp_path)


def test_the_secret_does_not_depend_on_the_address(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    chosen = choose_secret(None, is_local=True, where="127.0.0.1:1", runtime_dir=tmp_path)
    assert chosen == choose_secret(None, is_local=True, where="127.0.0.1:2", runtime_dir=tmp_path)
    assert chosen != choose_secret(None, is_local=True, where="127.0.0.1:1", runtime_dir=tmp_path / "other")


def test_a_token_overrides_the_key_and_is_required_between_hosts(tmp_path: Path) -> None:
    given = "a token that was given"
    assert choose_secret(given, is_local=True, where="127.0.0.1:1", runtime_dir=tmp_path) == given
    assert choose_secret(given, is_local=False, where="10.0.0.1:1", runtime_dir=tmp_path) == given
    with pytest.raises(UsageError, match=r"10\.0\.0\.1:1, which other machines can reach"):
        choose_secret(None, is_local=False, where="10.0.0.1:1", runtime_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_tokens_of_different_contexts_differ() -> None:
    tokens = {derive_token("secret", *parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), ("ab", "c", ""))}
    assert len(tokens) == 4
    assert derive_token("secret", "ab", "c") in tokens
    assert derive_token("another", "ab", "c") not in tokens
