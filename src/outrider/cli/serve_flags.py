"""Flags of `vllm serve` and `llama-server` that `outrider serve` has no option of the same name for."""

from __future__ import annotations

from outrider.cli import llama_cpp
from outrider.cli.flag import Names, unsupported

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

# without effect here: the reason, which a note gives -> the flags
_WITHOUT_EFFECT = {
    "the backend chooses its kernels": Names(
        valued=(
            "attention-backend|compilation-config -cc|optimization-level -O|max-seq-len-to-capture|"
            "cuda-graph-sizes|attention-config -ac|kernel-config|additional-config|"
            "override-attention-dtype|cudagraph-capture-sizes|max-cudagraph-capture-size|moe-backend|"
            "linear-backend|performance-mode"
        ),
        bare=(
            "enforce-eager --no-enforce-eager|disable-custom-all-reduce|disable-cascade-attn|"
            "perf --no-perf|repack --no-repack -nr|op-offload --no-op-offload|specialize-active-lora|"
            "enable-flashinfer-autotune --no-enable-flashinfer-autotune"
        ),
    ),
    "preempted requests are computed again": Names(valued="swap-space|preemption-mode"),
    "the KV cache has pages of one size, which all requests share": Names(
        valued=(
            "block-size|prefix-caching-hash-algo|cache-ram -cram|ctx-checkpoints --swa-checkpoints -ctxcp|"
            "slot-prompt-similarity -sps"
        ),
        bare="use-v2-block-manager|disable-hybrid-kv-cache-manager",
    ),
    "long prompts are always computed in chunks": Names(
        bare="enable-chunked-prefill --no-enable-chunked-prefill",
    ),
    "the engine sizes its steps itself": Names(
        valued=(
            "num-scheduler-steps|num-lookahead-slots|scheduler-delay-factor|max-num-partial-prefills|"
            "max-long-partial-prefills|long-prefill-token-threshold|dbo-decode-token-threshold|"
            "dbo-prefill-token-threshold"
        ),
        bare="async-scheduling --no-async-scheduling|multi-step-stream-outputs|enable-dbo",
    ),
    "the engine has a thread of its own": Names(bare="disable-async-output-proc"),
    "only the beginning of a prompt is reused": Names(valued="cache-reuse"),
    "the field priority of a request always counts": Names(valued="scheduling-policy"),
    "every rank is a process": Names(valued="distributed-executor-backend"),
    "the files of the model decide": Names(
        valued=(
            "load-format|config-format|model-impl|model-loader-extra-config|safetensors-load-strategy|"
            "ignore-patterns|lora-extra-vocab-size|lora-dtype|tokenizer-mode|pt-load-map-location"
        ),
        bare="calculate-kv-scales|allow-deprecated-quantization|enable-lora-bias",
    ),
    "weights are read from the file once and stay in memory": Names(
        valued="max-parallel-loading-workers",
        bare="use-tqdm-on-load --no-use-tqdm-on-load|mmap",
    ),
    "models take and make text": Names(
        valued=(
            "task|runner|convert|limit-mm-per-prompt|mm-processor-kwargs|mm-processor-cache-gb|"
            "allowed-local-media-path|media-io-kwargs|allowed-media-domains|mm-processor-cache-type|"
            "mm-shm-cache-max-object-size-mb|mm-encoder-tp-mode|mm-encoder-attn-backend|video-pruning-rate|"
            "default-mm-loras"
        ),
        bare=(
            "disable-mm-preprocessor-cache|skip-mm-profiling|no-mmproj|language-model-only|mm-encoder-only|"
            "interleave-mm-strings|enable-mm-embeds|disable-chunked-mm-input|enable-tower-connector-lora"
        ),
    ),
    "prompts are in the log with --log-requests only": Names(
        valued="max-log-len",
        bare="disable-log-requests",
    ),
    "--log-interval sets how often throughput is in the log": Names(bare="disable-log-stats"),
    "the log has a line for each request": Names(
        valued="disable-access-log-for-endpoints",
        bare="disable-uvicorn-access-log",
    ),
    "the log has one form": Names(
        valued="log-colors",
        bare=(
            "log-prefix --no-log-prefix|log-timestamps --no-log-timestamps|aggregate-engine-logging|"
            "log-error-stack|enable-log-deltas --no-enable-log-deltas"
        ),
    ),
    "uvicorn's warnings are in the log": Names(valued="uvicorn-log-level"),
    "one process answers HTTP": Names(
        valued="api-server-count|threads-http|renderer-num-workers",
        bare="disable-frontend-multiprocessing",
    ),
    "pages of --allowed-origins may send GET and POST, with any headers": Names(
        valued="allowed-methods|allowed-headers",
        bare="allow-credentials",
    ),
    "the calls in every answer with tools are parsed": Names(bare="enable-auto-tool-choice"),
    "the text parts of a message are joined": Names(valued="chat-template-content-format"),
    "the role of an answer is assistant": Names(valued="response-role"),
    "one library compiles all grammars": Names(
        valued="guided-decoding-backend|structured-outputs-config",
        bare="guided-decoding-disable-fallback",
    ),
    'with tool_choice "none" the template has no tools': Names(bare="exclude-tools-when-tool-choice-none"),
    "--max-loras adapters are in memory": Names(valued="max-cpu-loras"),
    "-tp divides every layer": Names(
        valued=(
            "decode-context-parallel-size -dcp|prefill-context-parallel-size -pcp|all2all-backend|"
            "eplb-config|expert-placement-strategy|num-redundant-experts"
        ),
        bare="fully-sharded-loras|enable-expert-parallel -ep|enable-eplb",
    ),
    "/metrics has all metrics": Names(
        valued="show-hidden-metrics-for-version|collect-detailed-traces|kv-cache-metrics-sample",
        bare=(
            "kv-cache-metrics|cudagraph-metrics|enable-mfu-metrics|enable-layerwise-nvtx-tracing|"
            "enable-logging-iteration-details"
        ),
    ),
    "/load is always served": Names(bare="enable-server-load-tracking"),
    "/openapi.json needs no key, as it has no data": Names(bare="disable-fastapi-docs"),
    "usage always has them": Names(bare="enable-prompt-tokens-details"),
    "the page at / is always served": Names(bare="no-webui --no-ui --webui --ui"),
    "--reasoning-parser does it": Names(bare="enable-reasoning"),
    "the operating system places the threads of -t": Names(valued="cpu-mask -C|cpu-range -Cr|cpu-strict"),
    "/metrics is always served": Names(bare="metrics"),
    "/metrics has the number of running requests": Names(bare="slots --no-slots"),
    "K/V has one form for all layers and models": Names(
        valued=(
            "mamba-cache-dtype|mamba-ssm-cache-dtype|mamba-block-size|mamba-cache-mode|"
            "dcp-kv-cache-interleave-size|cp-kv-cache-interleave-size"
        ),
        bare="kv-sharing-fast-prefill",
    ),
    "every rank and every replica is a process": Names(
        valued="data-parallel-backend -dpb",
        bare="worker-use-ray|disable-nccl-for-dp-synchronization",
    ),
    "/openapi.json describes the routes": Names(bare="enable-offline-docs"),
    "responses have no system_fingerprint": Names(valued="fingerprint-mode|fingerprint-value"),
    "headers have 64 KiB, and bodies --max-body-bytes": Names(
        valued="h11-max-incomplete-event-size|h11-max-header-count",
    ),
}
IGNORED = (*unsupported(_WITHOUT_EFFECT), *llama_cpp.IGNORED)

# whose effect would be missed: what to do instead -> the flags
_WITH_EFFECT = {
    """use --speculative-config, such as '{"model": "…", "num_speculative_tokens": 5}'""": Names(
        valued=(
            "speculative-model|num-speculative-tokens|ngram-prompt-lookup-max|ngram-prompt-lookup-min|"
            "speculative-draft-tensor-parallel-size|speculative-disable-by-batch-size|"
            "speculative-max-model-len|speculative-model-quantization|spec-decoding-acceptance-method|"
            "spec-type|typical-acceptance-sampler-posterior-threshold|"
            "typical-acceptance-sampler-posterior-alpha"
        ),
        bare="speculative-disable-mqa-scorer|disable-logprobs-during-spec-decoding",
    ),
    """use --override-generation-config, such as '{"temperature": 0.6}', or give it in the requests""": Names(
        valued=(
            "n-predict -n --predict|temp --temperature|top-k|top-p|min-p|repeat-penalty|presence-penalty|"
            "frequency-penalty|logit-bias -l|reverse-prompt -r|grammar|grammar-file|json-schema -j|"
            "json-schema-file -jf|chat-template-kwargs"
        ),
        bare="ignore-eos",
    ),
    "give skip_special_tokens in the requests": Names(bare="special -sp"),
    "give structured_outputs with disable_any_whitespace in the requests": Names(
        bare="guided-decoding-disable-any-whitespace",
    ),
    "it is no sampling parameter here: leave it out": Names(
        valued=(
            "samplers|sampler-seq --sampling-seq|typical --typical-p|top-nsigma --top-n-sigma|mirostat|"
            "xtc-probability|dry-multiplier|dynatemp-range|logits-processors|logits-processor-pattern"
        ),
    ),
    "use --reasoning-parser auto, or leave it out": Names(valued="reasoning-format|reasoning -rea"),
    "give thinking_token_budget in the requests": Names(valued="reasoning-budget"),
    "it is a field of requests: leave it out": Names(bare="return-tokens-as-token-ids"),
    "change config.json in a copy of the model's folder": Names(
        valued=(
            "hf-overrides|rope-scaling|rope-theta|rope-scale|rope-freq-base|rope-freq-scale|yarn-orig-ctx|"
            "override-kv|hf-config-path"
        ),
    ),
    "use --gpu-layers N, which keeps the other layers on the CPU": Names(
        valued="cpu-offload-gb|override-tensor -ot|n-cpu-moe -ncmoe",
        bare="cpu-moe -cmoe|no-kv-offload -nkvo",
    ),
    "start the command on each machine with torchrun, and give -tp or -pp": Names(
        valued="nnodes|node-rank|master-addr|master-port|rpc",
    ),
    "start a server with --replicas N on each machine": Names(
        valued=(
            "data-parallel-size-local -dpl|data-parallel-address -dpa|data-parallel-rank -dpn|"
            "data-parallel-start-rank -dpr|data-parallel-rpc-port -dpp"
        ),
        bare="headless|data-parallel-hybrid-lb -dph|data-parallel-external-lb -dpe",
    ),
    "use --kv-cache-memory-bytes": Names(valued="num-gpu-blocks-override"),
    "K/V stays in its process: leave it out": Names(
        valued=(
            "kv-transfer-config|slot-save-path|kv-events-config|ec-transfer-config|kv-offloading-size|"
            "kv-offloading-backend"
        ),
    ),
    "the text ends where the context is full: leave it out": Names(bare="context-shift"),
    "use --max-num-seqs 1": Names(bare="no-cont-batching -nocb"),
    "use -tp N": Names(valued="split-mode -sm|tensor-split -ts"),
    "use --device cuda:N": Names(valued="main-gpu -mg"),
    "use --request-timeout": Names(valued="timeout -to"),
    "set the environment variable HF_HOME": Names(valued="download-dir"),
    "set the environment variable HF_TOKEN": Names(valued="hf-token -hft"),
    "set the environment variable HF_HUB_OFFLINE=1": Names(bare="offline"),
    "download the file, and give its path as MODEL": Names(valued="hf-file -hff|model-url -mu"),
    "start a server for each model": Names(valued="models-dir"),
    "--revision is the tokenizer's, too": Names(valued="tokenizer-revision"),
    "--revision is the code's, too": Names(valued="code-revision"),
    "give token ids in the requests: leave it out": Names(bare="skip-tokenizer-init"),
    "use --method suffix": Names(valued="lookup-cache-static -lcs|lookup-cache-dynamic -lcd"),
    "use --enable-lora --lora-modules NAME=PATH": Names(
        valued="lora|lora-scaled|qlora-adapter-name-or-path",
    ),
    "use --tool-call-parser": Names(valued="tool-parser-plugin"),
    "put a proxy in front of the server": Names(
        valued="middleware|path|ssl-ciphers",
        bare="enable-request-id-headers|enable-ssl-refresh",
    ),
    "use --allowed-origins": Names(valued="cors-origins"),
    "put a proxy in front of the server, which checks the certificates of clients": Names(
        valued="ssl-ca-certs|ssl-cert-reqs",
    ),
    "redirect standard error to a file": Names(valued="log-file|log-config-file"),
    "the log has no texts of answers: leave it out": Names(bare="enable-log-outputs"),
    "stop the server to free its memory": Names(bare="enable-sleep-mode"),
    "the server generates text": Names(
        valued="mmproj -mm|pooling|pooler-config|override-pooler-config",
        bare="embedding --embeddings|reranking --rerank",
    ),
    "give token ids or text in the requests": Names(bare="enable-prompt-embeds"),
    "its classes are vLLM's: leave it out": Names(
        valued="worker-cls|worker-extension-cls|scheduler-cls|io-processor-plugin",
    ),
    "use one of the formats of --reasoning-parser": Names(valued="reasoning-parser-plugin|reasoning-config"),
    "use --max-model-len with the size of the window": Names(bare="disable-sliding-window"),
    "the client calls the tools: leave it out": Names(valued="tool-server"),
    'give "additionalProperties": false in the schemas': Names(
        bare="guided-decoding-disable-additional-properties",
    ),
    "start the server again with the new weights": Names(valued="weight-transfer-config"),
    "/metrics has the times of all requests: leave it out": Names(bare="enable-per-request-metrics"),
    "/tokenize has the tokens of a text: leave it out": Names(bare="enable-tokenizer-info-endpoint"),
    "give token ids as prompt, with return_token_ids: leave it out": Names(bare="tokens-only"),
    "no profile is made: leave it out": Names(valued="profiler-config", bare="ray-workers-use-nsight"),
}
REFUSED = unsupported(_WITH_EFFECT)
