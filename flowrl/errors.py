"""Errors a user can act on: each message says what was wrong, where, and what is allowed."""


class FlowrlError(Exception):
    """Base of every error that flowrl raises on purpose; the command line prints it and returns its `exit_code`."""

    exit_code = 2


class ConfigError(FlowrlError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class CheckpointError(FlowrlError):
    """A checkpoint or weight file is missing, truncated, foreign, or does not match its recorded hash."""


class RewardError(FlowrlError):
    """A reward model gives no scores: it refuses a prompt or an image, cannot be reached, or broke its contract."""


class RewardContractError(RewardError):
    """The scores of a reward model break its contract: wrong type, wrong shape, or a value that is not finite."""


class CreditError(FlowrlError):
    """A credit rule broke its contract, or was not given what it needs."""


class TrainingError(FlowrlError):
    """Training cannot go on: a loss or a gradient is not finite."""

    exit_code = 1


class PartError(FlowrlError):
    """A part that is not flowrl's own (a rule, reward, loss, sampler or world of the user's or of a plug-in) raised an exception."""

    exit_code = 1


MAX_SEED = 2**62
"""Largest seed of a run, a rule or a command; what is added to it stays below PyTorch's 2^63."""


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise `ConfigError` naming `field`, `value` and what is `allowed` unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{field} = {value!r} is not allowed: {allowed}")
