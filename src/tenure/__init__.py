"""Tenure: an LLM serving runtime in which the KV cache is a managed, visible resource."""

__version__ = "0.1.0"
