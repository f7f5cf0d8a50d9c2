"""The probe: one forward that tells an adapter that does something from one that doesn't."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.llm import LLM
from engine.lora.residency import AdapterResidency, Lease
from engine.protocol import (
    AddRequest,
    CallDone,
    CallFailed,
    ProbeAdapter,
    ProbeResult,
    SamplingParams,
    UnloadAdapter,
)
from tests.end_to_end.peft_reference import save_random_adapter, save_tiny_llama

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in `base`, and an adapter that speaks up."""
    root = tmp_path_factory.mktemp("probing")
    save_tiny_llama(root / "base")
    save_random_adapter(
        root / "base", root / "loud", seed=1, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]
    )
    return root / "loud"


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def llm(
    request: pytest.FixtureRequest, adapter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    state_dir = tmp_path_factory.mktemp("state")
    base = adapter.parent / "base"
    with LLM(
        str(base), state_dir=str(state_dir), dtype=request.param, num_threads=1, kernels="torch"
    ) as llm:
        yield llm


def scaled(adapter: Path, folder: Path, factor: float) -> Path:
    """Write a copy of the adapter with its B multiplied."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    tensors = load_file(adapter / WEIGHTS)
    changed = {
        name: (tensor * np.float32(factor) if "lora_B" in name else tensor)
        for name, tensor in tensors.items()
    }
    save_file(changed, folder / WEIGHTS)
    return folder


def answer_of(llm: LLM, call: ProbeAdapter | UnloadAdapter) -> CallDone | CallFailed:
    events = llm.core.handle(call)
    while True:
        for event in events:
            if isinstance(event, CallDone | CallFailed) and event.call_id == call.call_id:
                return event
        events = llm.core.step()


def probe(llm: LLM, lora_id: str) -> ProbeResult:
    answer = answer_of(llm, ProbeAdapter(call_id="p", lora_id=lora_id))
    assert isinstance(answer, CallDone), answer
    assert answer.probe is not None
    return answer.probe


def test_an_adapter_that_does_something_is_told_from_one_that_does_not(
    llm: LLM, adapter: Path, tmp_path: Path
) -> None:
    llm.load_adapter("loud", adapter)
    llm.load_adapter("silent", scaled(adapter, tmp_path / "silent", 1e-25))

    loud, silent = probe(llm, "loud"), probe(llm, "silent")

    assert (loud.has_effect, silent.has_effect) == (True, False)
    assert loud.logit_gap > 100 * loud.noise
    assert silent.logit_gap <= silent.noise
    assert math.isfinite(loud.logit_gap)
    llm.core.check_invariants()
    assert all(each.num_leases == each.num_claims == 0 for each in llm.status().adapters)


def test_logits_that_are_not_finite_are_no_effect(llm: LLM, adapter: Path, tmp_path: Path) -> None:
    llm.load_adapter("bursting", scaled(adapter, tmp_path / "bursting", 3e38))

    result = probe(llm, "bursting")

    assert (result.has_effect, result.is_finite, result.logit_gap) == (False, False, 0.0)
    assert probe(llm, "loud").has_effect, "nothing of it stays behind"


def test_a_probe_runs_beside_requests_and_takes_none_of_their_blocks(
    llm: LLM, adapter: Path
) -> None:
    num_free_blocks = llm.status().num_free_blocks
    request = AddRequest(
        request_id="r", prompt_ids=[5, 6, 7], params=SamplingParams(max_tokens=4, ignore_eos=True)
    )
    llm.core.handle(request)

    assert probe(llm, "loud").has_effect
    assert llm.core.scheduler.has_work
    while llm.core.has_work:
        llm.core.step()
    assert llm.status().num_free_blocks == num_free_blocks


def test_a_probe_of_what_is_unknown_or_goes_away_is_refused(llm: LLM, adapter: Path) -> None:
    unknown = answer_of(llm, ProbeAdapter(call_id="p", lora_id="nobody"))
    assert isinstance(unknown, CallFailed)
    assert (unknown.status, unknown.code) == (404, "model_not_found")

    llm.load_adapter("fleeting", adapter)
    assert llm.core.handle(ProbeAdapter(call_id="p", lora_id="fleeting")) == []
    events = llm.core.handle(UnloadAdapter(call_id="u", lora_id="fleeting"))
    while llm.core.has_work:
        events += llm.core.step()
    refused = {event.call_id: event for event in events if isinstance(event, CallFailed)}
    assert (refused["p"].status, refused["p"].code) == (409, "adapter_unloaded")
    assert any(isinstance(event, CallDone) and event.call_id == "u" for event in events)
    llm.core.check_invariants()


def test_a_probe_without_room_ends_in_time(adapter: Path, tmp_path: Path) -> None:
    base = str(adapter.parent / "base")
    with LLM(base, state_dir=str(tmp_path), dtype="fp32", num_threads=1, kernels="torch") as llm:
        llm.load_adapter("waiting", adapter)
        assert llm.core.adapters is not None
        lease = hold_all_rows(llm.core.adapters.residency)

        failed = answer_of(llm, ProbeAdapter(call_id="p", lora_id="waiting", timeout_s=0.0))

        assert isinstance(failed, CallFailed)
        assert (failed.status, failed.code) == (429, "overloaded")
        llm.core.adapters.residency.check_invariants()
        llm.core.adapters.residency.release(lease)


def hold_all_rows(residency: AdapterResidency) -> Lease:
    residency.add(
        "hog",
        content_digest="sha256:hog",
        image=Path("hog"),
        num_rows=residency.num_rows,
        max_rank=1,
    )
    residency.claim("hog")
    assert residency.next_load() is not None
    residency.loaded("hog")
    residency.unclaim("hog")
    lease = residency.lease("hog")
    assert lease is not None
    return lease
