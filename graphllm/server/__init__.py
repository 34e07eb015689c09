"""HTTP server with the APIs of OpenAI and Anthropic, on Starlette and uvicorn (extra ``serve``).

`app` builds the ASGI application of a loaded model, `model_router` that of several models, and
`run_server` serves it. Nothing else in graphllm imports this package but the verb ``serve``.
"""
