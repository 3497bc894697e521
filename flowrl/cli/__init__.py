"""The command line: commands, progress, figures, reports."""

__all__: list[str] = []  # of its modules, those with an `__all__` are public
