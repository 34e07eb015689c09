"""``python -m graphllm``: the command line."""

from .cli import main

main()
