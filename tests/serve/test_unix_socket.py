"""A server that listens on a Unix socket, instead of a host and port."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from served import forked, served

from outrider.errors import ConfigError
from outrider.serve.listening import unix_socket
from outrider.serve.options import ServerOptions
from outrider.serve.run import Process


@pytest.mark.parametrize("replicas", ["1", "2"])
def test_a_server_answers_on_its_socket(replicas: str, tmp_path: Path) -> None:
    path = tmp_path / "outrider.sock"
    start = served if replicas == "2" else forked  # a fork cannot start replicas
    with start(
        "builtin-draft", "--uds", str(path), "--max-model-len", "64", "--replicas", replicas
    ) as running:
        assert running.url == f"unix://{path}"
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=60
        ) as client:
            body = {"prompt": "The", "max_tokens": 3}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        assert running.stop() == 0 and not path.exists()


def test_the_socket_of_a_killed_server_is_replaced_and_no_other(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    left = unix_socket(path)
    with pytest.raises(ConfigError, match=r"/x cannot be listened on: Address already in use\."):
        unix_socket(path)
    left.close()  # as a process that was killed leaves it
    with unix_socket(path) as again:
        assert again.family == socket.AF_UNIX
        assert stat.S_IMODE(Path(path).stat().st_mode) & 0o022 == 0, "others may not write, by the umask"
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(ConfigError, match=r"/file cannot be listened on: it exists and is no socket\."):
        unix_socket(str(file))
    assert file.read_text() == "kept"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="it exists and is no socket"):
        unix_socket(str(link))
    assert link.is_symlink()
    with pytest.raises(ConfigError, match="cannot be listened on"):
        unix_socket(str(tmp_path / ("x" * 200)))


@pytest.mark.parametrize("kind", ["datagram", "full"])
def test_a_socket_that_cannot_be_connected_to_is_in_use(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    with socket.socket(
        socket.AF_UNIX, socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM
    ) as used:
        used.bind(path)
        waiting = []
        if kind == "full":
            used.listen(0)
            for _ in range(3):  # more than its queue takes
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect_ex(path)
        before = os.lstat(path).st_ino
        with pytest.raises(ConfigError, match="Address already in use"):
            unix_socket(path)
        assert os.lstat(path).st_ino == before
        for each in waiting:
            each.close()


def test_a_socket_of_another_user_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "x")
    with unix_socket(path):
        monkeypatch.setattr("outrider.serve.listening.socket", Refused)
        with pytest.raises(ConfigError, match="Address already in use"):
            unix_socket(path)
        assert os.path.exists(path)


class Refused(socket.socket):
    """A socket that may not connect: the tests may run as root, to whom all is allowed."""

    def connect_ex(self, address: Any) -> int:
        return errno.EACCES


def test_a_server_that_stops_leaves_the_socket_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    successor = []

    def serve(_: uvicorn.Server, listeners: list[socket.socket]) -> None:
        for each in listeners:  # as at the end, before the last responses
            each.close()
        if again:
            successor.append(unix_socket(str(path)))

    monkeypatch.setattr(uvicorn.Server, "run", serve)
    server: Any = SimpleNamespace(options=ServerOptions(uds=str(path)))
    for again in (False, True):
        Process(httpx.ASGITransport, server).run()  # type: ignore[arg-type]
        assert path.exists() == again
    successor[0].close()
