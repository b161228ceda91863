"""Advice on traces, logs and running servers: why prompts missed, and what to change."""

from tenure.lint.live import Recent
from tenure.lint.rules import Finding, Lint, Place, lint

__all__ = ["Finding", "Lint", "Place", "Recent", "lint"]
