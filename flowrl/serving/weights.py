"""Loading of the weights of a served reward before the first request."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from flowrl.core.errors import ConfigError, FlowrlError


def load_weights(reward: object) -> None:
    """Call `load()` of a reward, if it has one, and of the rewards among the fields of a data class
    such as `WeightedSum`.

    Raises `ConfigError` if that fails.
    """
    load = getattr(reward, "load", None)
    if callable(load):
        try:
            load()
        except FlowrlError:
            raise
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(f"reward: {type(reward).__name__}.load() failed: {reason}") from error
    for item in fields(reward) if is_dataclass(reward) else ():
        value = getattr(reward, item.name)
        for part in value.values() if isinstance(value, Mapping) else (value,):
            if callable(getattr(part, "score", None)):
                load_weights(part)
