"""Flags of `vllm serve` and `llama-server` that `outrider serve` has no option of the same name for."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from outrider.cli.flags import LLAMA_CPP, STEP, Flag

ALIASES = {  # field -> further names of its option
    "model": "-m",
    "quantization": "-q",
    "max_model_len": "--ctx-size -c",
    "max_num_seqs": "--parallel -np",
    "device": "-dev",
    "gpu_layers": "--n-gpu-layers -ngl",
    "seed": "-s",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "threads": "-t",
    "replicas": "--data-parallel-size -dp",
    "served_model_name": "--alias -a",
    "log_requests": "--enable-log-requests/--no-enable-log-requests",
    "chat_template": "--chat-template-file",
    "ssl_certfile": "--ssl-cert-file",
    "ssl_keyfile": "--ssl-key-file",
}

_FILES = "the files of the model decide"
_BACKEND = "the backend chooses its kernels"
_HTTP = "one process answers HTTP"
_PAGES = "pages of --allowed-origins may send GET and POST, with the headers Authorization and Content-Type"
_TEXT = "models take and make text"
_IGNORED = (  # without effect here; the help is the reason
    Flag("", bool, "--enforce-eager --no-enforce-eager", _BACKEND, False),
    Flag("", bool, "--disable-custom-all-reduce", _BACKEND, False),
    Flag("", str, "--attention-backend", _BACKEND),
    Flag("", str, "--compilation-config", _BACKEND),
    Flag("", str, "--optimization-level -O", _BACKEND),
    Flag("", str, "--max-seq-len-to-capture", _BACKEND),
    Flag("", str, "--swap-space", "preempted requests are computed again"),
    Flag("", str, "--block-size", "pages of the KV cache have one size"),
    Flag("", bool, "--enable-chunked-prefill --no-enable-chunked-prefill",
         "long prompts are always computed in chunks", False),
    Flag("", bool, "--async-scheduling --no-async-scheduling", STEP, False),
    Flag("", str, "--num-scheduler-steps", STEP),
    Flag("", str, "--scheduling-policy", "the field priority of a request always counts"),
    Flag("", str, "--distributed-executor-backend", "every rank is a process"),
    Flag("", str, "--load-format", _FILES),
    Flag("", str, "--config-format", _FILES),
    Flag("", str, "--model-impl", _FILES),
    Flag("", str, "--tokenizer-mode", _FILES),
    Flag("", str, "--task", _TEXT),
    Flag("", str, "--runner", _TEXT),
    Flag("", str, "--limit-mm-per-prompt", _TEXT),
    Flag("", bool, "--disable-log-requests", "prompts are in the log with --log-requests only", False),
    Flag("", bool, "--disable-log-stats", "--log-interval sets how often throughput is in the log", False),
    Flag("", bool, "--disable-uvicorn-access-log", "the log has a line for each request", False),
    Flag("", str, "--uvicorn-log-level", "uvicorn's warnings are in the log"),
    Flag("", bool, "--disable-frontend-multiprocessing", _HTTP, False),
    Flag("", str, "--api-server-count", _HTTP),
    Flag("", str, "--allowed-methods", _PAGES),
    Flag("", str, "--allowed-headers", _PAGES),
    Flag("", bool, "--allow-credentials", _PAGES, False),
    Flag("", bool, "--enable-auto-tool-choice", "the calls in every answer with tools are parsed", False),
    Flag("", str, "--chat-template-content-format", "the text parts of a message are joined"),
    Flag("", str, "--response-role", "the role of an answer is assistant"),
    Flag("", str, "--guided-decoding-backend", "one library compiles all grammars"),
    Flag("", str, "--structured-outputs-config", "one library compiles all grammars"),
    Flag("", str, "--generation-config",
         "it gives no defaults for sampling: without a temperature, a request has 1"),
    Flag("", str, "--max-logprobs", "a request may have 20"),
    Flag("", bool, "--enable-prompt-tokens-details", "usage always has them", False),
    Flag("", bool, "--jinja", "chat templates are always rendered by Jinja", False),
    Flag("", bool, "--metrics", "/metrics is always served", False),
    Flag("", bool, "--slots --no-slots", "/metrics has the number of running requests", False),
    Flag("", bool, "--no-context-shift", "the text ends where the context is full", False),
    Flag("", bool, "--cont-batching -cb", "requests always share steps", False),
    Flag("", str, "--threads-http", _HTTP),
)  # fmt: skip
IGNORED = (*(replace(flag, hidden=True) for flag in _IGNORED), *LLAMA_CPP)

NEW_SPELLING = """use --speculative-config, such as '{"model": "…", "num_speculative_tokens": 5}'"""
_REQUEST = "the server has no defaults for sampling: give them in the requests"
_COPY = "change config.json in a copy of the model's folder"
_PROXY = "put a proxy in front of the server"
_REFUSED = (  # what would be missed; the help is the cure
    *(Flag("", str, f"--{name}", NEW_SPELLING) for name in (
        "speculative-model", "num-speculative-tokens", "ngram-prompt-lookup-max", "ngram-prompt-lookup-min",
        "speculative-draft-tensor-parallel-size", "speculative-disable-by-batch-size",
        "speculative-max-model-len",
    )),
    Flag("", str, "--reasoning-parser", "reasoning stays in the text of the answer: leave it out"),
    Flag("", bool, "--return-tokens-as-token-ids", "logprobs name tokens by their text: leave it out", False),
    Flag("", str, "--override-generation-config", _REQUEST),
    Flag("", str, "--n-predict -n", _REQUEST),
    Flag("", str, "--temp --temperature", _REQUEST),
    Flag("", str, "--top-k", _REQUEST),
    Flag("", str, "--top-p", _REQUEST),
    Flag("", str, "--min-p", _REQUEST),
    Flag("", str, "--hf-overrides", _COPY),
    Flag("", str, "--rope-scaling", _COPY),
    Flag("", str, "--cpu-offload-gb", "use --gpu-layers N, which keeps the other layers on the CPU"),
    Flag("", str, "--num-gpu-blocks-override", "use --kv-cache-memory-bytes"),
    Flag("", str, "--split-mode -sm", "use -tp N"),
    Flag("", str, "--tensor-split -ts", "use -tp N"),
    Flag("", str, "--main-gpu -mg", "use --device cuda:N"),
    Flag("", str, "--timeout -to", "use --request-timeout"),
    Flag("", str, "--download-dir", "set the environment variable HF_HOME"),
    Flag("", str, "--hf-token", "set the environment variable HF_TOKEN"),
    Flag("", str, "--hf-repo -hf -hfr", "give the hub id as MODEL"),
    Flag("", str, "--lora", "use --enable-lora --lora-modules NAME=PATH"),
    Flag("", str, "--middleware", _PROXY),
    Flag("", str, "--ssl-ca-certs", f"{_PROXY}, which checks the certificates of clients"),
    Flag("", str, "--ssl-cert-reqs", f"{_PROXY}, which checks the certificates of clients"),
    Flag("", str, "--config", "give its keys as options"),
    Flag("", bool, "--embedding --embeddings", "the server generates text", False),
    Flag("", bool, "--reranking --rerank", "the server generates text", False),
)  # fmt: skip
REFUSED = tuple(replace(flag, hidden=True) for flag in _REFUSED)


def repeated(words: Sequence[str], options: Container[str]) -> list[str]:
    """Arguments in which every value has its option: `--api-key a b` as `--api-key a --api-key b`.

    options: those that may be given several times.  Only where MODEL is the first word, or --model is given,
    since `b` could be MODEL otherwise.
    """
    has_model = any(word.split("=")[0] in ("--model", "-m") for word in words)
    if not words or (words[0].startswith("-") and not has_model):
        return [*words]
    made: list[str] = []
    option, has_value = "", False  # the last one that may have several values
    for word in words:
        if option and not has_value:
            has_value = True  # a value may begin with a dash
        elif word.startswith("-"):
            option, has_value = word if word.replace("_", "-") in options else "", False
        elif option:
            made.append(option)
        made.append(word)
    return made
