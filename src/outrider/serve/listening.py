"""Sockets to listen on."""

from __future__ import annotations

import os
import socket as sockets
import stat
from collections.abc import Mapping
from contextlib import suppress
from errno import EADDRINUSE, EADDRNOTAVAIL, EAFNOSUPPORT, ECONNREFUSED, EEXIST
from socket import AI_PASSIVE, SOCK_STREAM, create_server, getaddrinfo, socket
from typing import Any

from outrider.errors import ConfigError

CONNECT_SECONDS = 1.0  # for a server to show that its socket is in use


def tcp_sockets(host: str, port: int) -> list[socket]:
    """Sockets of all addresses of a host.  Raises ConfigError."""
    try:
        found = getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE)
        return _bound({address: family for family, _, _, _, address in found})
    except (OSError, UnicodeError) as error:
        raise _refused(f"{host}:{port}", error) from error


def unix_socket(path: str) -> socket:
    """A Unix socket at a path, in place of one that no process listens on.  Raises ConfigError."""
    if not hasattr(sockets, "AF_UNIX"):
        raise ConfigError("uds needs a system with Unix sockets: give host and port.")
    made = socket(sockets.AF_UNIX, SOCK_STREAM)
    try:
        if os.path.lexists(path):
            _unlink_unused(path)
        made.bind(path)
        made.listen()
    except (OSError, ValueError) as error:
        made.close()
        raise _refused(path, error) from error
    return made


def _unlink_unused(path: str) -> None:
    """Remove the socket of a process that was killed.  Raises OSError for anything else.

    Only a refused connection shows that no process listens.  A full queue, a missing permission and a socket
    of another type belong to processes that run.
    """
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError(EEXIST, "it exists and is no socket")
    with socket(sockets.AF_UNIX, SOCK_STREAM) as other:
        other.settimeout(CONNECT_SECONDS)
        if other.connect_ex(path) != ECONNREFUSED:
            raise OSError(EADDRINUSE, os.strerror(EADDRINUSE))
    os.unlink(path)


def mark_of(path: str) -> tuple[int, ...]:
    """What tells a socket from a later one at its path.  The time: because inodes are given out again."""
    found = os.lstat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def unlink_marked(path: str, mark: tuple[int, ...]) -> None:
    """Remove a socket, unless another process has put its own there."""
    with suppress(FileNotFoundError):
        if mark_of(path) == mark:
            os.unlink(path)


def _refused(place: str, error: Exception) -> ConfigError:
    reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
    return ConfigError(f"{place} cannot be listened on: {reason}.")


def _bound(families: Mapping[Any, int]) -> list[socket]:
    """Sockets of some of these addresses.  Those that this machine lacks are left out if there are others."""
    made, lacking = [], None
    for address, family in families.items():
        try:
            made.append(create_server(address, family=family))
        except OSError as error:
            if error.errno not in (EADDRNOTAVAIL, EAFNOSUPPORT):
                raise
            lacking = error
    if lacking is not None and not made:
        raise lacking
    return made
