"""The error of a result that is NaN or infinite, whose cause may be the data, the settings, or the model's files."""

from library.config.problems import ConfigError


class NotFiniteError(ConfigError):
    """Something that the model computed is NaN or infinite. Who knows the model's files may find the cause in them."""
