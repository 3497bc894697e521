"""What the notebooks in tutorials/ import: the checks of the exercises, figures, batches of
trajectories and short training runs.

Lessons and this package import public names of `flowrl` only; nothing in `flowrl` imports this
package.
"""
