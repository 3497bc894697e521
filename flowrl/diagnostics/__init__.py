"""Looking inside: what a rule does with a table, and how its gradient and its credit lie to the truth."""
