"""Prompts that are longer than a text encoder reads."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flowrl.policies.families import Family

SHOWN = 50
"""Characters of an example."""


def cut_prompts(pipe: Any, family: Family, texts: Sequence[str], tokens: int) -> list[str]:
    """A line for each length of the text encoders that cuts some of the prompts.

    Args:
        pipe: the pipeline, with its tokenizers: "tokenizer_2" for "text_encoder_2".
        family: its model family.
        texts: the prompts.
        tokens: the length of the last text encoder; the others have that of their tokenizer.

    Returns:
        The number of prompts that are cut, and the end of what is read of the longest.
    """
    found: dict[tuple[int, str], list[str]] = {}
    for name in family.encoders if family.cuts_prompts else ():
        tokenizer = getattr(pipe, name.replace("text_encoder", "tokenizer"), None)
        if tokenizer is None or not texts:
            continue
        last = name == family.encoders[-1]
        limit = tokens - family.reserved_tokens if last else tokenizer.model_max_length
        given = [*texts]
        if family.thinking is not None:
            options = dict(tokenize=False, add_generation_prompt=True)
            options["enable_thinking"] = family.thinking
            chats = [[{"role": "user", "content": text}] for text in texts]
            given = [tokenizer.apply_chat_template(chat, **options) for chat in chats]
        ids = tokenizer(given, verbose=False, truncation=False, padding=False).input_ids
        sizes = [len(one) for one in ids]
        if (count := sum(size > limit for size in sizes)) > 0:
            longest = ids[sizes.index(max(sizes))][:limit]
            read = tokenizer.decode(longest, skip_special_tokens=True).strip()
            setting = " (max_sequence_length)" if last else ""
            text = (
                f"{count:,} of {len(texts):,} prompts are cut at {limit} tokens{setting}: of the"
                f" longest, with {max(sizes)}, the last words read are {read[-SHOWN:]!r}"
            )
            found.setdefault((limit, text), []).append(name)
    return [f"{', '.join(names)}: {text}" for (_, text), names in found.items()]


@contextmanager
def quiet() -> Iterator[None]:
    """Within this context diffusers and transformers do not print the prompts that they cut."""
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
