"""What owns a network: the closed-form mixture, the small built-in model, diffusers' pipelines."""
