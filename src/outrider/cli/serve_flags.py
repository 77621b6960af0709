"""Flags of `vllm serve` and `llama-server` that `outrider serve` has no option of the same name for."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from outrider.cli import llama_cpp, vllm
from outrider.cli.flag import Flag
from outrider.cli.llama_cpp import MEMORY, STEP

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
    "root_path": "--api-prefix",
    "enable_prefix_caching": "--cache-prompt/--no-cache-prompt",
    "log_requests": "--enable-log-requests/--no-enable-log-requests",
    "chat_template": "--chat-template-file",
    "ssl_certfile": "--ssl-cert-file",
    "ssl_keyfile": "--ssl-key-file",
}

_FILES = "the files of the model decide"
_BACKEND = "the backend chooses its kernels"
_HTTP = "one process answers HTTP"
_KV = "the KV cache has pages of one size, which all requests share"
_PAGES = "pages of --allowed-origins may send GET and POST, with any headers"
_TEXT = "models take and make text"
_SYSTEM = "the operating system places the threads of -t"
_LOG = "the log has one form"
_IGNORED = (  # without effect here; the help is the reason
    Flag("", bool, "--enforce-eager --no-enforce-eager", _BACKEND, False),
    Flag("", bool, "--disable-custom-all-reduce", _BACKEND, False),
    Flag("", str, "--attention-backend", _BACKEND),
    Flag("", str, "--compilation-config -cc", _BACKEND),
    Flag("", str, "--optimization-level -O", _BACKEND),
    Flag("", str, "--max-seq-len-to-capture", _BACKEND),
    Flag("", str, "--cuda-graph-sizes", _BACKEND),
    Flag("", bool, "--disable-cascade-attn", _BACKEND, False),
    Flag("", bool, "--perf --no-perf", _BACKEND, False),
    Flag("", bool, "--repack --no-repack -nr", _BACKEND, False),
    Flag("", bool, "--op-offload --no-op-offload", _BACKEND, False),
    Flag("", str, "--swap-space", "preempted requests are computed again"),
    Flag("", str, "--block-size", _KV),
    Flag("", bool, "--enable-chunked-prefill --no-enable-chunked-prefill",
         "long prompts are always computed in chunks", False),
    Flag("", bool, "--async-scheduling --no-async-scheduling", STEP, False),
    Flag("", str, "--num-scheduler-steps", STEP),
    Flag("", bool, "--multi-step-stream-outputs", STEP, False),
    Flag("", str, "--num-lookahead-slots", STEP),
    Flag("", str, "--scheduler-delay-factor", STEP),
    Flag("", str, "--max-num-partial-prefills", STEP),
    Flag("", str, "--max-long-partial-prefills", STEP),
    Flag("", str, "--long-prefill-token-threshold", STEP),
    Flag("", bool, "--disable-async-output-proc", "the engine has a thread of its own", False),
    Flag("", str, "--preemption-mode", "preempted requests are computed again"),
    Flag("", bool, "--use-v2-block-manager", _KV, False),
    Flag("", bool, "--disable-hybrid-kv-cache-manager", _KV, False),
    Flag("", str, "--prefix-caching-hash-algo", _KV),
    Flag("", str, "--cache-ram -cram", _KV),
    Flag("", str, "--cache-reuse", "only the beginning of a prompt is reused"),
    Flag("", str, "--ctx-checkpoints --swa-checkpoints -ctxcp", _KV),
    Flag("", str, "--slot-prompt-similarity -sps", _KV),
    Flag("", str, "--scheduling-policy", "the field priority of a request always counts"),
    Flag("", str, "--distributed-executor-backend", "every rank is a process"),
    Flag("", str, "--load-format", _FILES),
    Flag("", str, "--config-format", _FILES),
    Flag("", str, "--model-impl", _FILES),
    Flag("", str, "--model-loader-extra-config", _FILES),
    Flag("", str, "--safetensors-load-strategy", _FILES),
    Flag("", str, "--ignore-patterns", _FILES),
    Flag("", bool, "--calculate-kv-scales", _FILES, False),
    Flag("", str, "--lora-extra-vocab-size", _FILES),
    Flag("", str, "--lora-dtype", _FILES),
    Flag("", str, "--max-parallel-loading-workers", MEMORY),
    Flag("", bool, "--use-tqdm-on-load --no-use-tqdm-on-load", MEMORY, False),
    Flag("", bool, "--mmap", MEMORY, False),
    Flag("", str, "--tokenizer-mode", _FILES),
    Flag("", str, "--task", _TEXT),
    Flag("", str, "--runner", _TEXT),
    Flag("", str, "--convert", _TEXT),
    Flag("", str, "--limit-mm-per-prompt", _TEXT),
    Flag("", str, "--mm-processor-kwargs", _TEXT),
    Flag("", str, "--mm-processor-cache-gb", _TEXT),
    Flag("", bool, "--disable-mm-preprocessor-cache", _TEXT, False),
    Flag("", bool, "--skip-mm-profiling", _TEXT, False),
    Flag("", str, "--allowed-local-media-path", _TEXT),
    Flag("", bool, "--no-mmproj", _TEXT, False),
    Flag("", bool, "--disable-log-requests", "prompts are in the log with --log-requests only", False),
    Flag("", bool, "--disable-log-stats", "--log-interval sets how often throughput is in the log", False),
    Flag("", bool, "--disable-uvicorn-access-log", "the log has a line for each request", False),
    Flag("", str, "--disable-access-log-for-endpoints", "the log has a line for each request"),
    Flag("", str, "--max-log-len", "prompts are in the log with --log-requests only"),
    Flag("", str, "--log-colors", _LOG),
    Flag("", bool, "--log-prefix --no-log-prefix", _LOG, False),
    Flag("", bool, "--log-timestamps --no-log-timestamps", _LOG, False),
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
    Flag("", bool, "--exclude-tools-when-tool-choice-none",
         'with tool_choice "none" the template has no tools', False),
    Flag("", str, "--max-cpu-loras", "--max-loras adapters are in memory"),
    Flag("", bool, "--fully-sharded-loras", "-tp divides every layer", False),
    Flag("", bool, "--enable-expert-parallel -ep", "-tp divides every layer", False),
    Flag("", str, "--show-hidden-metrics-for-version", "/metrics has all metrics"),
    Flag("", bool, "--enable-server-load-tracking", "/load is always served", False),
    Flag("", bool, "--disable-fastapi-docs", "/openapi.json needs no key, as it has no data", False),
    Flag("", bool, "--enable-prompt-tokens-details", "usage always has them", False),
    Flag("", bool, "--no-webui --no-ui --webui --ui", "the page at / is always served", False),
    Flag("", bool, "--enable-reasoning", "--reasoning-parser does it", False),
    Flag("", str, "--cpu-mask -C", _SYSTEM),
    Flag("", str, "--cpu-range -Cr", _SYSTEM),
    Flag("", str, "--cpu-strict", _SYSTEM),
    Flag("", bool, "--metrics", "/metrics is always served", False),
    Flag("", bool, "--slots --no-slots", "/metrics has the number of running requests", False),
    Flag("", str, "--threads-http", _HTTP),
)  # fmt: skip
IGNORED = (*(replace(flag, hidden=True) for flag in _IGNORED), *vllm.IGNORED, *llama_cpp.IGNORED)

NEW_SPELLING = """use --speculative-config, such as '{"model": "…", "num_speculative_tokens": 5}'"""
_REQUEST = "use --override-generation-config, such as '{\"temperature\": 0.6}', or give it in the requests"
_RULE = "it is no sampling parameter here: leave it out"
_LAYERS = "use --gpu-layers N, which keeps the other layers on the CPU"
_MACHINES = "start the command on each machine with torchrun, and give -tp or -pp"
_OTHERS = "start a server with --replicas N on each machine"
_FILE = "download the file, and give its path as MODEL"
_REASONING = "use --reasoning-parser auto, or leave it out"
_COPY = "change config.json in a copy of the model's folder"
_PROXY = "put a proxy in front of the server"
_REFUSED = (  # what would be missed; the help is the cure
    *(Flag("", str, f"--{name}", NEW_SPELLING) for name in (
        "speculative-model", "num-speculative-tokens", "ngram-prompt-lookup-max", "ngram-prompt-lookup-min",
        "speculative-draft-tensor-parallel-size", "speculative-disable-by-batch-size",
        "speculative-max-model-len", "speculative-model-quantization", "spec-decoding-acceptance-method",
        "spec-type",
    )),
    *(Flag("", str, f"--{name}", _REQUEST) for name in (
        "n-predict -n --predict", "temp --temperature", "top-k", "top-p",
        "min-p", "repeat-penalty", "presence-penalty", "frequency-penalty", "logit-bias -l",
        "reverse-prompt -r", "grammar", "grammar-file", "json-schema -j", "json-schema-file -jf",
        "chat-template-kwargs",
    )),
    Flag("", bool, "--ignore-eos", _REQUEST, False),
    Flag("", bool, "--special -sp", "give skip_special_tokens in the requests", False),
    Flag("", bool, "--guided-decoding-disable-any-whitespace",
         "give structured_outputs with disable_any_whitespace in the requests", False),
    *(Flag("", str, f"--{name}", _RULE) for name in (
        "samplers", "sampler-seq --sampling-seq", "typical --typical-p", "top-nsigma --top-n-sigma",
        "mirostat", "xtc-probability", "dry-multiplier", "dynatemp-range", "logits-processors",
        "logits-processor-pattern",
    )),
    *(Flag("", str, f"--{name}", _REASONING) for name in (
        "reasoning-format", "reasoning -rea",
    )),
    Flag("", str, "--reasoning-budget", "give thinking_token_budget in the requests"),
    Flag("", bool, "--return-tokens-as-token-ids", "it is a field of requests: leave it out", False),
    *(Flag("", str, f"--{name}", _COPY) for name in (
        "hf-overrides", "rope-scaling", "rope-theta", "rope-scale", "rope-freq-base", "rope-freq-scale",
        "yarn-orig-ctx", "override-kv",
    )),
    *(Flag("", str, f"--{name}", _LAYERS) for name in (
        "cpu-offload-gb", "override-tensor -ot", "n-cpu-moe -ncmoe",
    )),
    Flag("", bool, "--cpu-moe -cmoe", _LAYERS, False),
    Flag("", bool, "--no-kv-offload -nkvo", _LAYERS, False),
    *(Flag("", str, f"--{name}", _MACHINES) for name in (
        "nnodes", "node-rank", "master-addr", "master-port", "rpc",
    )),
    Flag("", str, "--data-parallel-size-local -dpl", _OTHERS),
    Flag("", str, "--data-parallel-address -dpa", _OTHERS),
    Flag("", str, "--num-gpu-blocks-override", "use --kv-cache-memory-bytes"),
    Flag("", str, "--kv-transfer-config", "K/V stays in its process: leave it out"),
    Flag("", str, "--slot-save-path", "K/V stays in its process: leave it out"),
    Flag("", bool, "--context-shift", "the text ends where the context is full: leave it out", False),
    Flag("", bool, "--no-cont-batching -nocb", "use --max-num-seqs 1", False),
    Flag("", str, "--split-mode -sm", "use -tp N"),
    Flag("", str, "--tensor-split -ts", "use -tp N"),
    Flag("", str, "--main-gpu -mg", "use --device cuda:N"),
    Flag("", str, "--timeout -to", "use --request-timeout"),
    Flag("", str, "--download-dir", "set the environment variable HF_HOME"),
    Flag("", str, "--hf-token -hft", "set the environment variable HF_TOKEN"),
    Flag("", bool, "--offline", "set the environment variable HF_HUB_OFFLINE=1", False),
    Flag("", str, "--hf-file -hff", _FILE),
    Flag("", str, "--model-url -mu", _FILE),
    Flag("", str, "--models-dir", "start a server for each model"),
    Flag("", str, "--tokenizer-revision", "--revision is the tokenizer's, too"),
    Flag("", str, "--code-revision", "--revision is the code's, too"),
    Flag("", bool, "--skip-tokenizer-init", "give token ids in the requests: leave it out", False),
    Flag("", str, "--lookup-cache-static -lcs", "use --method suffix"),
    Flag("", str, "--lookup-cache-dynamic -lcd", "use --method suffix"),
    Flag("", str, "--lora", "use --enable-lora --lora-modules NAME=PATH"),
    Flag("", str, "--lora-scaled", "use --enable-lora --lora-modules NAME=PATH"),
    Flag("", str, "--tool-parser-plugin", "use --tool-call-parser"),
    Flag("", str, "--middleware", _PROXY),
    Flag("", str, "--path", _PROXY),
    Flag("", bool, "--enable-request-id-headers", _PROXY, False),
    Flag("", str, "--cors-origins", "use --allowed-origins"),
    Flag("", str, "--ssl-ca-certs", f"{_PROXY}, which checks the certificates of clients"),
    Flag("", str, "--ssl-cert-reqs", f"{_PROXY}, which checks the certificates of clients"),
    Flag("", str, "--ssl-ciphers", _PROXY),
    Flag("", bool, "--enable-ssl-refresh", _PROXY, False),
    Flag("", str, "--log-file", "redirect standard error to a file"),
    Flag("", str, "--log-config-file", "redirect standard error to a file"),
    Flag("", bool, "--enable-log-outputs", "the log has no texts of answers: leave it out", False),
    Flag("", bool, "--enable-sleep-mode", "stop the server to free its memory", False),
    Flag("", str, "--mmproj -mm", "the server generates text"),
    Flag("", bool, "--enable-prompt-embeds", "give token ids or text in the requests", False),
    Flag("", str, "--pooling", "the server generates text"),
    Flag("", bool, "--embedding --embeddings", "the server generates text", False),
    Flag("", bool, "--reranking --rerank", "the server generates text", False),
)  # fmt: skip
REFUSED = (*(replace(flag, hidden=True) for flag in _REFUSED), *vllm.REFUSED)


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
