"""llama.cpp's server from the wheel `xllamacpp`, with the options of llama-server that serving.py gives.

Run by the interpreter in OUTRIDER_LLAMA_CPP_PYTHON, in place of a build of llama.cpp.
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", dest="model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("-np", dest="slots", type=int, required=True)
    parser.add_argument("-c", dest="context", type=int, required=True, help="tokens of all slots")
    parser.add_argument("-t", dest="threads", type=int, required=True)
    given = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.port = given.model, given.port
    params.n_parallel, params.n_ctx = given.slots, given.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
    server = xllamacpp.Server(params)
    print(xllamacpp.get_system_info(), server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
