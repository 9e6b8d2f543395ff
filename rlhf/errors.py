"""The one exception that a user's mistake raises. Nothing else of error handling lives here."""


class UserError(Exception):
    """A mistake that the user can mend.

    The message is one line: where it happened, what came, what was wanted, what to do. The command line prints it
    without a traceback and exits with code 2.
    """
