"""The library's one error for what it was given."""


class InputError(ValueError):
    """A model, text, table or setting cannot be used; the message is one sentence for the person who gave it."""
