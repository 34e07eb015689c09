"""All CUDA kernels are registered, with their sources, before these tests are collected."""

from graphllm.backends import find

assert find("cuda").kernels
