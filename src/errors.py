"""The two errors that end a command with one sentence instead of a traceback, and what their sentences consist of."""

from collections.abc import Iterable


class UserError(Exception):
    """Unusable input. The message is one sentence: what is wrong, where, and what to do."""

    status = 2  # exit status of the process


class RunFailed(UserError):
    """A failure after a valid start, such as a full disk. The message is one sentence too."""

    status = 1


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def reason(error: BaseException) -> str:
    """Return the operating system's message for an error if there is one, else the error's first line."""
    return getattr(error, "strerror", None) or first_line(error)


def some(names: Iterable[str]) -> str:
    """Return names in alphabetical order, of many the first five and how many more there are."""
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5:,} more" if len(ordered) > 5 else "")
