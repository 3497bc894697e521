"""The command line: commands, progress, figures, reports."""
