"""What a user did wrong, in one sentence."""


class ConfigError(ValueError):
    """One sentence: the key, its value, what is allowed, what to do."""
