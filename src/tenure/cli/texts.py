"""Tokenising the text of logs with a model's own tokenizer and chat template; its weights are not read."""

from __future__ import annotations

from collections.abc import Sequence

from tenure.cli.compose import NO_MODEL
from tenure.errors import ModelNotFound
from tenure.models import find_default
from tenure.models.sources import open_source
from tenure.traces import Tokenise


def model_tokeniser(model: str | None) -> Tokenise:
    """Tokenises as the server would: messages by the template, plain text as it is. None: the embedded model."""
    source = model or find_default()
    if source is None:
        raise ModelNotFound(NO_MODEL)
    tokenizer, template = open_source(str(source)).texts()

    def tokenise(prompt: object) -> Sequence[int]:
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
            return prompt
        if isinstance(prompt, list) and prompt and all(isinstance(item, dict) for item in prompt):
            return tokenizer.encode(template.render(prompt))
        raise ValueError("a prompt must be a text, a list of token ids or a list of messages")

    return tokenise
