"""The exceptions of chunkattn that are not about a single argument.

Wrong arguments raise the built-in ``TypeError``, ``ValueError`` or ``NotImplementedError``, always
as "`name` must ..., got ...". A refused call changes nothing.
"""


class ChunkAttnError(RuntimeError):
    """Base of all errors raised by chunkattn for its own reasons."""


class PoolExhaustedError(ChunkAttnError):
    """The pool has too few free blocks now. Nothing was allocated: free some and call again."""


class LifecycleError(ChunkAttnError):
    """A call that the state of its session, forward or request does not allow."""


class StaleContextError(LifecycleError):
    """A forward context was used after it had ended, or its session been reset or closed."""


class MissingDependencyError(ChunkAttnError, ImportError):
    """An optional package is not installed. The message says what to install."""
