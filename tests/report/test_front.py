from hypothesis import given
from hypothesis import strategies as st

from ness.report.front import front

numbers = st.integers(-5, 5).map(float)


@given(st.lists(st.tuples(numbers, numbers), max_size=12))
def test_nobody_on_the_front_is_beaten_and_everybody_else_is(points: list) -> None:
    def beaten(one: tuple) -> bool:
        return any(other != one and other[0] >= one[0] and other[1] >= one[1] for other in points)

    assert sorted(front(points)) == [i for i, one in enumerate(points) if not beaten(one)]
