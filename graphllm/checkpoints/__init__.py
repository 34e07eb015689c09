"""Model files by kind: GGUF, Hugging Face directories, llama2.c, random weights, the demo."""
