"""The error for a result that is NaN or infinite, caused by the data, the settings, or the model's files."""

from library.config.problems import ConfigError


class NotFiniteError(ConfigError):
    """The model computed NaN or infinity. Code that knows the model's files may find the cause there."""
