"""Advice on traces and logs: why prompts missed, and what to change."""

from tenure.lint.rules import Finding, Lint, lint

__all__ = ["Finding", "Lint", "lint"]
