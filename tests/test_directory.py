"""Hugging Face directories as models: what is read, what is refused, in a line each."""

from __future__ import annotations

import json
import shutil

import hf_models
import numpy as np
import pytest
from test_llama2c import write_model  # type: ignore[import-not-found]

import graphllm
from graphllm.errors import ConfigError, ModelFileError
