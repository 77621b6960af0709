"""GGUF files: header and metadata (file), weights (weights, blocks), config and tokenizer."""
