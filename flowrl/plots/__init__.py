"""Figures, tables and pages, made only from the files of runs and comparisons."""
