"""Tests of the papers' claims: claims as data, runs as lines of a file, verdicts computed by rules
written before the runs.
"""
