"""The library's one error for what it was given."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """A model, text, table or setting cannot be used; the message is one sentence for the person who gave it."""


def above_zero(config: object, *names: str) -> None:
    """Raises InputError unless these fields of a config are."""
    for name in names:
        if not getattr(config, name) > 0:
            raise InputError(f"{name} {getattr(config, name):g} is not above 0")


def between_0_and_1(config: object, *names: str) -> None:
    """Raises InputError unless these fields of a config are, both ends among them."""
    for name in names:
        if not 0 <= getattr(config, name) <= 1:
            raise InputError(f"{name} {getattr(config, name):g} is not between 0 and 1")


@contextmanager
def about(what: str) -> Iterator[None]:
    """An InputError raised inside begins with what it is about."""
    try:
        yield
    except InputError as e:
        raise InputError(f"{what}: {e}") from e
