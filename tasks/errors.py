"""Errors that are the user's to mend."""


class UserError(Exception):
    """One sentence: the value, the rule, the remedy. Printed without a traceback; exit code 2, never retried."""
