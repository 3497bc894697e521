"""Figures and the report, made from results and nothing else."""
