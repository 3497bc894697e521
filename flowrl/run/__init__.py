"""What makes iterations a job: settings, presets, checkpoints, evaluation, observers, plan,
processes.
"""
