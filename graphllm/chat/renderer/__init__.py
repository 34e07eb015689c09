"""Rendering of chat templates in a separate process; `chat/renderer_process.py` starts it.

`worker` is the main loop of the process with its resource limits, `sandbox` the Jinja2 environment,
`provenance` a str type that tracks which of its characters came from the caller. The process
imports nothing else of graphllm, so that it starts quickly.
"""
