"""llama.cpp's own server as the peer, where OUTRIDER_LLAMA_CPP names a folder with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider import LLM, ConfigError, SamplingParams
from outrider.bench import peers
from outrider.bench.peers import Rival

SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if options["-m"] == "bad.gguf":
    sys.exit("failed to load model")
asked = []

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        if len(asked) == 1:
            return  # the connection ends without an answer
        self.send_response(503 if len(asked) < 3 else 200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kinds = ["none", "ngram-simple", "draft-simple"]
        tokens = [*body["prompt"], kinds.index(options.get("--spec-type", "none")), int(options["-t"])]
        result = {{"tokens": tokens, "timings": {{"prompt_ms": 500, "predicted_ms": 1500}}}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(result).encode())

    def log_message(self, *more): ...

HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture
def binaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    server = tmp_path / "llama-server"
    server.write_text(SERVER.format(python=sys.executable))
    server.chmod(0o755)
    monkeypatch.setenv("OUTRIDER_LLAMA_CPP", str(tmp_path))
    monkeypatch.setattr(peers, "_readable", lambda name, model: _itself(model))
    return tmp_path


class _itself:
    def __init__(self, model: str) -> None:
        self.model = model

    def __enter__(self) -> str:
        return self.model

    def __exit__(self, *error: object) -> None: ...


def test_each_mode_asks_a_server_with_its_kind_of_speculation(tiny: Path, binaries: Path) -> None:
    llm = LLM(str(tiny))
    given = [Rival.parse("llama.cpp=a.gguf,b.gguf", str(tiny), None)]
    with peers.running(given, llm, GREEDY, 3, seconds=60) as found:
        assert list(found) == ["llama.cpp", "llama.cpp lookup", "llama.cpp draft"]
        for kind, label in enumerate(found):
            (answer,) = found[label]("a", [{"prompt_token_ids": [5]}]).answers
            assert answer.token_ids[:2] == [5, kind]
            assert answer.token_times == pytest.approx([0.5, 2.0, 2.0])


def test_what_the_server_writes_last_is_the_error(tiny: Path, binaries: Path) -> None:
    given = [Rival.parse("llama.cpp=bad.gguf", str(tiny), None)]
    with (
        pytest.raises(ConfigError, match=r"^llama.cpp cannot run 'bad.gguf': failed to load model$"),
        peers.running(given, LLM(str(tiny)), GREEDY, 3, seconds=60),
    ):
        pass


def test_a_folder_without_the_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_LLAMA_CPP", str(tmp_path))
    with pytest.raises(ConfigError, match=r"OUTRIDER_LLAMA_CPP: .* has no llama-server"):
        Rival.parse("llama.cpp=a.gguf", "target", None)
