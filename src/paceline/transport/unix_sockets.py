"""Unix sockets for processes of one user on one host: bind and remove a socket, and check the user of a peer.

A socket in Linux's abstract namespace has no permissions, so every process in the network namespace can connect.
Therefore each end requests the user of the other end from the kernel before it reads a byte. Processes of different
users must connect with TCP.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
from typing import Any

from paceline.errors import AddressError
from paceline.transport.addresses import Address

_MAX_PATH = 100
_UCRED = struct.Struct("=iII")  # the credentials of a peer on Linux: process, user, group
_XUCRED = struct.Struct("=II68x")  # the credentials of a peer on macOS: version, user, groups
_SOL_LOCAL, _LOCAL_PEERCRED = 0, 1


def has_unix_sockets() -> bool:
    return hasattr(socket, "AF_UNIX") and sys.platform != "win32"


def bind_unix() -> tuple[socket.socket, Address]:
    """Return a listening Unix socket and its address.

    On Linux the address is an abstract name, so a killed process leaves no file. On other systems the socket is in a
    new directory that only this user can enter.
    """
    if sys.platform == "linux":
        address = Address("unix", path=f"@paceline-{os.getpid()}-{secrets.token_hex(8)}")
    else:
        folder = tempfile.mkdtemp(prefix="paceline-")  # created with mode 0700
        if len(folder) > _MAX_PATH - 2:  # sun_path ends at 104 bytes on macOS and 108 on Linux
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="paceline-", dir="/tmp")
        address = Address("unix", path=f"{folder}/s")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(address.unix_name)
        listening.listen(512)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        remove_unix(address)
        raise AddressError(f"cannot listen on {address}: {error.strerror or error}") from None
    return listening, address


def remove_unix(address: Address) -> None:
    """Remove the file and the directory of a socket that :func:`bind_unix` created. Abstract names have none."""
    if not address.is_abstract:
        shutil.rmtree(os.path.dirname(address.path), ignore_errors=True)


def is_other_user(connected: socket.socket | Any) -> bool:
    """Return whether the other end of a connected Unix socket belongs to another user.

    Linux and macOS report the user of the other end. On other systems, the permissions of the directory that
    :func:`bind_unix` creates protect the socket.
    """
    if connected.family != getattr(socket, "AF_UNIX", None):
        return False
    try:
        if sys.platform == "linux":
            _, user, _ = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        elif sys.platform == "darwin":
            _, user = _XUCRED.unpack(connected.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size))
        else:
            return False
    except (OSError, struct.error):
        return True  # reject the peer if the socket is closed or the system reports no user
    return bool(user != os.geteuid())


def check_user(connected: socket.socket, address: Address) -> None:
    """Close the connection and raise AddressError if the other end belongs to another user."""
    if is_other_user(connected):
        connected.close()
        raise AddressError(f"cannot use {address}: its listener belongs to another user. Connect with TCP")
