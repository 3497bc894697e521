"""What the notebooks in tutorials/ import: checks of the exercises (one module per lesson) and a few figures.

Lessons import the public face of `flowrl`; nothing in `flowrl` imports this package.
"""
