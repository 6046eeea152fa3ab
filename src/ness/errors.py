"""The one family of errors and warnings that this package raises."""


class NessError(Exception):
    """What was found, what was expected, what to do: the message says all three.

    >>> import ness
    >>> try:
    ...     raise ness.NessError("layer 'fc': found rank 0, expected more than 0; raise eps")
    ... except ness.NessError as error:
    ...     print(error)
    layer 'fc': found rank 0, expected more than 0; raise eps
    """


class NessWarning(UserWarning):
    """Something that is allowed and probably not what you want; the message says what it means."""
