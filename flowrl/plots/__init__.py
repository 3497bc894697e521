"""Figures, tables and pages, made from the files of runs and comparisons alone."""
