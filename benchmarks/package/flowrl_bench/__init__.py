"""The papers' claims tested: claims as data, runs as lines of a file, verdicts computed by rules written before the runs."""
