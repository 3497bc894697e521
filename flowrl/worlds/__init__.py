"""The built-in worlds: prompts, renderer, verifier."""
