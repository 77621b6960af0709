#!/usr/bin/env bash
# The prompts with which llama.cpp introduced speculative decoding, in its own flags.  First argument: one of
# the names below.  MODEL and DRAFT may be any folder or hub id, for instance a code model of 34 B and one of
# 7 B; the built-in pair is small, so expect its text to be odd and the figures to be the point.
set -euo pipefail
run() {
    outrider generate -m "${MODEL:-builtin}" -md "${DRAFT:-builtin-draft}" -e -c 1024 --top_k 1 \
        --draft "${N_DRAFT:-3}" "$@"
}

case "${1:-quicksort}" in
quicksort)
    run -n 256 -s 8 \
        -p "// Quick-sort implementation in C (4 spaces indentation + detailed comments) \
and sample usage:\n\n#include"
    ;;
dijkstra-cpp)
    run -n 512 -s 20 \
        -p "// Dijkstra algorithm in C++ (4 spaces indentation + detailed comments) + sample usage:\n\n"
    ;;
dijkstra-python)
    run -n 512 -s 20 \
        -p "# Dijkstra's shortest path algorithm in Python (4 spaces indentation) + complexity analysis:\n\n"
    ;;
*)
    echo "usage: $0 quicksort | dijkstra-cpp | dijkstra-python" >&2
    exit 2
    ;;
esac
