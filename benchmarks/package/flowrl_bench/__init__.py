"""Tests of the papers' claims: claims as data, runs as lines of a file, verdicts computed by rules
written before the runs.
"""

from flowrl import __version__ as __version__
