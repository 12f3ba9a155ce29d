"""What can go wrong, in one sentence each.

Every error a user can cause is a `QkvError`. Its message says what is wrong, where, and what
would be right; the command line prints that sentence and nothing else.
"""


class QkvError(Exception):
    """The base of all errors raised on purpose."""


class SourceError(QkvError):
    """A source that is missing, incomplete, or of an unknown kind."""


class ConfigError(QkvError):
    """A configuration key that is missing, unknown, or contradicts another."""


class CheckpointError(QkvError):
    """A weight file that is damaged, hostile, or does not fit its description."""


class TokenizerError(QkvError):
    """A tokenizer or chat template that cannot be read or refuses its input."""


class RequestError(QkvError):
    """A request that cannot be served: token out of range, prompt too long, a value out of bounds."""


class UnsupportedError(QkvError):
    """Something described correctly that this part of the library cannot run."""


class CapacityError(QkvError):
    """More memory or cache than there is."""


class EngineError(QkvError):
    """An engine that was closed, or a request of one that was cancelled, or broken off with a step."""
