"""The one error a user sees without a traceback."""


class UserError(Exception):
    """Something the reader of the message can fix.

    The message says what was wanted, what was found, and what to do. The command line prints it as one
    line and exits with `exit_code`; the server answers with a 4xx.
    """

    exit_code = 2


class QueueFullError(UserError):
    """Too many requests wait already; the same one may be sent again later. The server answers with a 503."""
