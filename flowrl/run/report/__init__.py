"""Pages, figures and cards of runs, and the comparison of base and trained weights."""
