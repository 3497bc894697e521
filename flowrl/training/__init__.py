"""The trainer, and what surrounds it: settings, checkpoints, evaluation, comparison."""
