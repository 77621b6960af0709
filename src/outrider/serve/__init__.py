"""HTTP server with OpenAI's routes and vLLM's extensions, on `AsyncLLM`.

command line ── run (uvicorn, signals) ── app (routes) ── guard (keys, sizes, room) ── AsyncLLM
"""
