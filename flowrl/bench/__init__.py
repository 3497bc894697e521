"""The comparison of all methods, and the tools that it shares with `flowrl bench`: runs as lines of
a file, searches for settings, and verdicts computed by rules written before the runs.
"""
