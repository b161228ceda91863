"""Request fields that change the answer and are not built yet.

Each is refused by name, unless it holds a value that asks for nothing. Fields in no table here change nothing and are
let pass. When one gets built, its line goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenure.errors import InvalidRequest

# field: the values, besides null, that ask for nothing
COMMON: dict[str, tuple[Any, ...]] = {
    # vLLM
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "mm_processor_kwargs": ({},),
    # llama.cpp
    "n_predict": (-1,),
    "grammar": ("",),
    "json_schema": ({},),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "samplers": ([],),
    # SGLang
    "regex": (),
    "ebnf": (),
}

CHAT: dict[str, tuple[Any, ...]] = {
    **COMMON,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "reasoning": (),
    "thinking": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "chat_template": (),
}

COMPLETION: dict[str, tuple[Any, ...]] = {
    **COMMON,
    "suffix": ("",),
    "best_of": (1,),
    "prompt_embeds": (),
}


def refuse_unbuilt(fields: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise InvalidRequest for the first field of `table` that asks for what is not built."""
    for name, value in fields.items():
        if name in table and value is not None and value not in table[name]:
            neutral = ", ".join(repr(v) for v in table[name]) or "null"
            raise InvalidRequest(f"{name} is not built yet; leave it out (or send {neutral})", param=name)
