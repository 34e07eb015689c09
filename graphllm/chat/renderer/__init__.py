"""Rendering of chat templates in a separate process; `chat/renderer_process.py` starts it.

`worker` is the process's loop and its limits, `sandbox` the Jinja2 environment, `provenance` the
text that knows which of its characters came from the caller. The process imports nothing else of
graphllm, so that it starts quickly.
"""
