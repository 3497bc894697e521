"""Diagnostics: what a credit rule does with a table; gradients and credit compared with the ground truth; statistics."""
