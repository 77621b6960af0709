"""A server that listens on a Unix socket, instead of a host and port."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import httpx
import pytest
from served import forked, served

from outrider.errors import ConfigError
from outrider.serve.listening import unix_socket


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
    with pytest.raises(ConfigError, match="cannot be listened on"):
        unix_socket(str(file))
    assert file.read_text() == "kept"
    with pytest.raises(ConfigError, match="cannot be listened on"):
        unix_socket(str(tmp_path / ("x" * 200)))
