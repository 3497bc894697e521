"""Prompts: files and datasets of them, GenEval's requests, and generators."""

from flowrl.prompts.files import PromptFile, load_prompts, prompts_from, read_prompts, write_prompts
from flowrl.prompts.generate import compositional_prompts, image_prompts, text_prompts
from flowrl.prompts.geneval import Clause, Request, request_of
from flowrl.prompts.stream import PromptStream

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
