"""Errors that are the user's to mend."""


class UserError(Exception):
    """One sentence: the value, the rule, the remedy. Printed without a traceback; exit code 2, never retried."""


def first_line(e: BaseException) -> str:
    """What a library's error says, in a line; its name when it says nothing."""
    return (str(e).strip() or type(e).__name__).splitlines()[0]
