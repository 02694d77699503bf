"""What a layout may be, without a world or a model."""

import pytest

from nnmpi.compose.layout import Layout
from nnmpi.errors import UsageError


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"schedule": "2f2b"},
            "schedule '2f2b' is unknown; choose one of naive, gpipe, 1f1b, interleaved, zero-bubble",
        ),
        ({"schedule": "inference"}, "schedule 'inference' is unknown"),
        ({"recompute": "sometimes"}, "recompute 'sometimes' is unknown; choose one of never, always, except-last"),
        ({"reduction": "slow"}, "reduction 'slow' is unknown; choose one of fast, fixed"),
        ({"virtual_stages": 0}, "0 virtual stages are not possible"),
        ({"virtual_stages": 2}, "belong to the pipeline schedule interleaved; 1f1b has one per rank"),
        ({"split": (3, 0)}, "has a stage without layers"),
        ({"split": ()}, "has a stage without layers"),
        ({"split": "5,4"}, "split '5,4' is unknown; give auto, or numbers of links such as"),
        ({"split": (2.5, 4)}, "is unknown; give auto, or numbers"),
        ({"tp": 2, "reduction": "fixed"}, "covers dp and pp; sharded layers add in parts"),
        ({"schedule": "pipedream", "reduction": "fixed"}, "reduction fixed does not go with pipedream"),
        ({"schedule": "pipedream", "recompute": "always"}, "recompute does not go with pipedream"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Layout(**options)  # type: ignore[arg-type]


def test_which_microbatches_are_computed_again() -> None:
    def again(recompute: str) -> list[bool]:
        return [Layout(recompute=recompute).recomputes(m, 3) for m in range(3)]

    assert again("never") == [False] * 3
    assert again("always") == [True] * 3
    assert again("except-last") == [True, True, False]
