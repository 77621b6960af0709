"""Checkpoints on disk: configs, safetensors, GGUF, quantized layouts, LoRA adapters."""
