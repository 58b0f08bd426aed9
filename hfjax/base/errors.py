"""Where an error was raised."""


def module_of(error: Exception) -> str:
    """Return the name of the module whose line raised an error.

    >>> try:
    ...     int("a")
    ... except ValueError as error:
    ...     module_of(error).startswith("jax")
    False
    """
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else str(at.tb_frame.f_globals.get("__name__", ""))
