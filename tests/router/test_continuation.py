"""What a request that has begun asks of workers: its outputs are facts, and what is left is less."""

from router.continuation import demand, needs_decode
from router.placement import Worker
from router.request import ChoiceSoFar, SamplingParams, WorkerCall

LOST = Worker("d0", 7, "d0:1", "float32/native/avx2/tp1")


def call(
    prompt: tuple[int, ...] = (1, 2, 3), so_far: dict[int, ChoiceSoFar] | None = None, **sampling: int
) -> WorkerCall:
    return WorkerCall("r", "m", prompt, SamplingParams(**sampling), "salt", choices=so_far or {})  # type: ignore[arg-type]


def test_a_fresh_request_asks_for_all_of_it() -> None:
    found = demand(call(max_tokens=10, n=3), {}, None, may_prefill=True)
    assert (found.prompt_token_ids, found.cache_salt, found.request_id) == ((1, 2, 3), "salt", "r")
    assert (found.num_output_tokens, found.num_choices) == (10, 3)
    assert (found.prefill, found.numerics_class) == (True, "")


def test_the_output_of_a_single_choice_is_prompt_from_now_on() -> None:
    so_far = {0: ChoiceSoFar((4, 5), finished=False)}
    found = demand(call(max_tokens=10), so_far, LOST, may_prefill=True)
    assert found.prompt_token_ids == (1, 2, 3, 4, 5)
    assert (found.num_output_tokens, found.num_choices) == (8, 1)
    assert (found.prefill, found.numerics_class) == (True, LOST.numerics_class)


def test_of_several_choices_the_open_ones_go_on_and_share_the_prompt() -> None:
    so_far = {
        0: ChoiceSoFar((4,), finished=True),
        1: ChoiceSoFar((5,), finished=False),
        2: ChoiceSoFar((), finished=False),
    }
    found = demand(call(max_tokens=10, n=3), so_far, LOST, may_prefill=True)
    assert (found.prompt_token_ids, found.num_output_tokens, found.num_choices) == ((1, 2, 3), 10, 2)
    so_far[2] = ChoiceSoFar((), finished=True)
    assert demand(call(max_tokens=10, n=3), so_far, LOST, may_prefill=True).prompt_token_ids == (1, 2, 3, 5)


def test_prefill_is_asked_for_where_it_has_something_to_do() -> None:
    two = {0: ChoiceSoFar((4,), finished=False), 1: ChoiceSoFar((5,), finished=False)}
    one = {0: ChoiceSoFar((4,), finished=False)}
    assert not demand(call(), {}, None, may_prefill=False).prefill
    assert demand(call((1,)), {}, None, may_prefill=True).prefill
    assert demand(call((1,)), one, LOST, may_prefill=True).prefill
    assert demand(call((1, 2), n=2), two, LOST, may_prefill=True).prefill
    assert not demand(call((1,), n=2), two, LOST, may_prefill=True).prefill, "they share no token before the last"


def test_decode_is_needed_unless_prefill_samples_the_last_tokens() -> None:
    assert needs_decode(call(max_tokens=2))
    assert not needs_decode(call(max_tokens=1, n=3))
    assert needs_decode(call(so_far={0: ChoiceSoFar((4,), finished=False)}, max_tokens=3))
    assert not needs_decode(call(so_far={0: ChoiceSoFar((4, 5), finished=False)}, max_tokens=3))
    two = {0: ChoiceSoFar((4, 5), finished=False), 1: ChoiceSoFar((6, 7), finished=False)}
    assert needs_decode(call(so_far=two, max_tokens=3, n=2)), "prefill samples nothing for several with output"
