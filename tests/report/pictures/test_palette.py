import pytest

from ness.report.pictures.palette import DARK, LIGHT, shades


def test_blue_when_learnt_green_gained_red_lost() -> None:
    assert shades([[90.0, None, None], [93.0, 80.0, None], [89.0, 80.2, 50.0]]) == [
        ["d", "", ""], ["g2", "d", ""], ["l1", "n", "d"],
    ]  # fmt: skip
    assert shades([[90.0, 91.0]]) == [["d", "d"]]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_letters_stand_out_from_every_field(palette: dict) -> None:
    for field, letters in palette.values():
        low, high = sorted((luminance(field), luminance(letters)))
        assert (high + 0.05) / (low + 0.05) > 4.5
