"""Errors that a user can act on. The command line prints each as one line and exits with code 1."""

from __future__ import annotations


class GraphllmError(Exception):
    """Base of every error that graphllm raises on purpose; its text is one clear line."""


class ModelFileError(GraphllmError):
    """A model file is missing, malformed or not supported; names the file or tensor."""


class ConfigError(GraphllmError):
    """A model configuration has a missing, unknown or impossible value; names the key."""


class GraphError(GraphllmError):
    """A graph cannot be built or verified (shapes, dtypes, state order); names op and scope."""


class PlacementError(GraphllmError):
    """No available backend can run an op, or ``strict`` found one off the first backend."""


class RequestError(GraphllmError):
    """A generation request has an impossible value; names the parameter."""
