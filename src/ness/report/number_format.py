"""Numbers as people read them."""

from ness.report.paper import Printed
from ness.report.table import Measured


def number(value: Measured, signed: bool = False) -> str:
    """'72.46 ± 0.26'; without a deviation '72.46'; nothing for nothing.

    >>> number((72.456, 0.256)), number((0.034, None), signed=True), number(None)
    ('72.46 ± 0.26', '+0.03', '')
    """
    if value is None:
        return ""
    mean, deviation = value
    text = f"{mean:+.2f}" if signed else f"{mean:.2f}"
    return text if deviation is None else f"{text} ± {deviation:.2f}"


def printed(value: Printed, signed: bool = False) -> str:
    """A number of the paper with the digits it is printed with.

    >>> printed((-2, 1), signed=True), printed((0, 0), signed=True), printed((72.46, 0.26))
    ('-2 ± 1', '0 ± 0', '72.46 ± 0.26')
    """
    mean, deviation = value
    if isinstance(mean, int):
        return f"{mean:+d} ± {deviation}" if signed and mean else f"{mean} ± {deviation}"
    return number((mean, deviation), signed)


def short(value: float) -> str:
    """Three digits, or all before the point.

    >>> short(0.000564), short(33.0), short(1971.4)
    ('0.000564', '33', '1,971')
    """
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """A time in the two units that matter.

    >>> duration(4.24), duration(75), duration(7380), duration(200000)
    ('4.2 s', '1 min 15 s', '2 h 3 min', '2 d 7 h')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, below, name, lesser in ((60, 3600, "min", "s"), (3600, 86400, "h", "min"), (86400, None, "d", "h")):
        if below is None or whole < below:
            rest = whole % unit // {"s": 1, "min": 60, "h": 3600}[lesser]
            return f"{whole // unit} {name}" + (f" {rest} {lesser}" if rest else "")
    raise AssertionError("the last unit has no end")
