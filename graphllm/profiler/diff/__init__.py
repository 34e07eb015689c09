"""Comparison of two executors, op by op: `graphllm.diff`."""
