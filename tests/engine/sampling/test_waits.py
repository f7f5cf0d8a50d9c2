"""How often the host waits for the device: once for a step's tokens, once for prompts' logprobs."""

import pytest
import torch

from engine.protocol import SamplingParams
from engine.sampling.prompt_logprobs import PromptLogprobs
from engine.sampling.sampler import SamplingRow, sample
from tests.engine.sampling.fake_device import DEVICE, FakeDevice

VOCAB = 600
ONE_COPY = {"copy to the host": 1}
NOTHING_FINITE = [float("nan"), float("inf"), -float("inf")]

EVERYTHING = {
    "temperature": 0.8,
    "top_k": 30,
    "top_p": 0.9,
    "min_p": 0.01,
    "min_tokens": 5,
    "logit_bias": {3: 1.5},
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.3,
    "num_logprobs": 4,
}
WISHES = [
    {"temperature": 0.0},
    {},
    {"min_p": 0.05},
    {"top_k": 20},
    {"top_p": 0.9},
    {"top_p": 0.9999},  # wider than the candidates that a CPU looks at first
    {"logit_bias": {3: 1.5}, "min_tokens": 5},
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 0.2, "presence_penalty": 0.3},
    {"num_logprobs": 0},
    {"num_logprobs": 4},
    EVERYTHING,
]


def row(number, **params):
    return SamplingRow(
        params=SamplingParams(max_tokens=9, **params),
        seed=number,
        position=12,
        token_ids=[5, 6, 7, 5, 8],
        num_prompt_tokens=3,
        eos_token_ids=(2,),
    )


def logits_of(num_rows):
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(num_rows)) * 2


@pytest.mark.parametrize("wishes", [[one] for one in WISHES] + [WISHES], ids=str)
def test_a_step_of_sampling_waits_for_the_device_once(wishes):
    rows = [row(number, **one) for number, one in enumerate(wishes)]
    logits = logits_of(len(rows))
    with FakeDevice() as device:
        drawn = sample(device.place(logits.clone()), rows)
    assert device.waits == ONE_COPY
    assert drawn == sample(logits, rows)


@pytest.mark.parametrize("broken", NOTHING_FINITE)
def test_a_row_without_a_token_costs_no_other_wait(broken):
    rows = [row(number, **one) for number, one in enumerate(WISHES)]
    logits = logits_of(len(rows))
    logits[::2] = broken
    with FakeDevice() as device:
        drawn = sample(device.place(logits.clone()), rows)
    assert device.waits == ONE_COPY
    assert [token.token_id is None for token in drawn] == [True, False] * (len(rows) // 2)
    assert drawn == sample(logits, rows)


def test_the_logprobs_of_all_prompts_of_a_step_are_one_copy():
    """Tiles of two prompts that ask for different numbers, handed over in turns."""
    tiles = [(0, 2, 3), (1, 0, 2), (0, 2, 1)]  # position in the plan, best ones, rows

    def gathered(place):
        found = PromptLogprobs()
        for position, num_top, num_rows in tiles:
            found.add(
                position,
                place(logits_of(num_rows)),
                next_token_ids=list(range(num_rows)),
                num_top=num_top,
            )
        return found.by_position()

    with FakeDevice() as device:
        on_device = gathered(device.place)
    assert device.waits == ONE_COPY
    assert on_device == gathered(lambda logits: logits)
    assert [len(on_device[position]) for position in (0, 1)] == [4, 2]


class TestFakeDevice:
    """It counts: otherwise nothing above could fail."""

    @pytest.mark.parametrize(
        "wait",
        [
            lambda x: x.tolist(),
            lambda x: x[0, 0].item(),
            lambda x: bool((x > 0).any()),
            lambda x: x.cpu(),
            lambda x: x.nonzero(),
            lambda x: x[x > 0],
            lambda x: x.masked_select(x > 0),
            lambda x: torch.tensor([1.0], device=x.device),
            lambda x: torch.tensor([1.0]).to(x.device),
        ],
    )
    def test_a_wait_is_counted(self, wait):
        with FakeDevice() as device:
            wait(device.place(torch.ones(2, 2)))
        assert device.waits.total() == 1

    def test_arithmetic_and_copies_that_nobody_waits_for_are_not(self):
        with FakeDevice() as device:
            x = device.place(torch.ones(2, 2))
            rows = torch.tensor([1]).to(DEVICE, non_blocking=True)
            y = (x[rows] + torch.arange(2, device=DEVICE)).softmax(-1)
        assert y.device == DEVICE
        assert not device.waits
