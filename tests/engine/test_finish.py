"""When a choice ends: EOS, stop ids, min_tokens, max_tokens, context length."""

import pytest

from engine.finish import finish_reason
from engine.request import FinishReason
from pagewire.sampling import SamplingParams

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("token", "index", "num_tokens", "params", "reason"),
    [
        (1, 0, 5, {}, STOP),
        (2, 0, 5, {}, STOP),
        (3, 0, 5, {}, None),
        (1, 0, 5, {"ignore_eos": True}, None),
        (7, 0, 5, {"stop_token_ids": (7,)}, STOP),
        (7, 0, 5, {"stop_token_ids": (7,), "ignore_eos": True}, STOP),
        (1, 0, 5, {"stop_token_ids": (1,), "ignore_eos": True}, STOP),
        (1, 2, 5, {"min_tokens": 3}, None),
        (7, 2, 5, {"min_tokens": 3, "stop_token_ids": (7,)}, None),
        (1, 3, 5, {"min_tokens": 3}, STOP),
        (3, 2, 5, {"max_tokens": 4}, None),
        (3, 3, 5, {"max_tokens": 4}, LENGTH),
        (1, 3, 5, {"max_tokens": 4}, STOP),
        (1, 3, 5, {"max_tokens": 4, "min_tokens": 4}, LENGTH),
        (3, 0, 9, {}, None),
        (3, 0, 10, {}, LENGTH),
        (1, 0, 10, {}, STOP),
    ],
)
def test_finish_reason(
    token: int, index: int, num_tokens: int, params: dict[str, object], reason: FinishReason | None
) -> None:
    found = finish_reason(token, index, num_tokens, SamplingParams(**params), frozenset({1, 2}), max_model_len=10)  # type: ignore[arg-type]
    assert found is reason
