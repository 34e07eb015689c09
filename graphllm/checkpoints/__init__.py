"""Checkpoints: GGUF, Hugging Face directories, llama2.c, random weights, the demo model."""
