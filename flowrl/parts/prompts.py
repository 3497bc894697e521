"""Prompts: files and datasets of them, GenEval's requests, and generators."""

from flowrl.parts.geneval import Clause, Request, request_of
from flowrl.parts.prompt_files import (
    PromptFile,
    load_prompts,
    prompts_from,
    read_prompts,
    write_prompts,
)
from flowrl.parts.prompt_lists import compositional_prompts, image_prompts, text_prompts
from flowrl.parts.prompt_stream import PromptStream

__all__ = [
    "Clause",
    "PromptFile",
    "PromptStream",
    "Request",
    "compositional_prompts",
    "image_prompts",
    "load_prompts",
    "prompts_from",
    "read_prompts",
    "request_of",
    "text_prompts",
    "write_prompts",
]
