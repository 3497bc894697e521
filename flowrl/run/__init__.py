"""Training: the trainer, settings, checkpoints, evaluation and comparisons."""
