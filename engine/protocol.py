"""The messages between a worker's HTTP server and its engine core.

msgpack over two zmq IPC sockets: the server PUSHes commands, the core PUSHes events, one event per
step. Every command with a `call_id` is answered by exactly one `CallDone` or `CallFailed`.
A request that was added is answered by `StepDone` outputs until one has a finish reason; a request
that can't be added is answered by `RequestFailed`, once, and by nothing else.
"""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen for one request.

    temperature 0 is greedy. top_k 0 means all. `seed` None lets the core draw one.
    n                    samples of one prompt; each draws its own noise
    min_p                keeps tokens at least this likely, relative to the most likely one; 0: all
    repetition_penalty   over prompt and answer; divides positive logits, multiplies negative ones
    presence_penalty     taken off once for each token that the answer has
    frequency_penalty    taken off for each time that the answer has it
    logit_bias           added to logits, by token id
    min_tokens           no end or stop token before the answer has as many
    num_logprobs         None for none, n for the sampled token's and the n most likely tokens'
    num_prompt_logprobs  the same for the tokens of the prompt; reads no cache
    Stop strings are the server's business, since they need text; ids are the core's.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    n: int = 1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    num_prompt_logprobs: int | None = None


# --- commands: server to core ------------------------------------------------------------------


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start one request. `lora_id` None is the base; an unknown one fails, never runs the base.

    cache_salt   requests share cached blocks only with requests of the same salt
    tenant       whose share of the engine it takes
    priority     lower runs first; within one, shares are fair
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    lora_id: str | None = None
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget a request; its blocks and lease are free at the next step. No answer follows."""

    request_id: str


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Lay a PEFT directory out as an arena image and make `lora_id` known.

    The same lora_id with the same path again is a no-op. Rows are taken at first use.
    """

    call_id: str
    lora_id: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget `lora_id`: queued requests fail at once, running ones at `timeout_s`."""

    call_id: str
    lora_id: str
    timeout_s: float = 30.0


class ProbeAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask whether `lora_id` changes what the model says; the answer is in CallDone.probe.

    Fails with `overloaded` when no rank rows could be had within `timeout_s`.
    """

    call_id: str
    lora_id: str
    timeout_s: float = 30.0


class GetStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for a CoreStatus in CallDone.status."""

    call_id: str


Command = AddRequest | AbortRequest | LoadAdapter | UnloadAdapter | ProbeAdapter | GetStatus

# --- events: core to server --------------------------------------------------------------------


class ModuleShape(msgspec.Struct, frozen=True):
    """One linear module's extents."""

    in_features: int
    out_features: int


class CoreProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One start-up step in words, for a person who waits."""

    text: str


class CoreReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The core serves. Everything the server needs to know of the model it didn't load.

    model_dir        directory with tokenizer.json and tokenizer_config.json
    base_identity    "sha256:…" over weights, format, dtype and rope
    modules          shape of each of the seven LoRA targets, equal in all layers
    lora_rows        rank rows of each arena group ("attention", "mlp", "embedding", "head");
                     empty without LoRA
    embedding_digests  see BaseDescription
    """

    base_id: str
    base_identity: str
    architecture: str
    model_dir: str
    dtype: str
    vocab_size: int
    num_layers: int
    hidden: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    modules: dict[str, ModuleShape]
    tie_word_embeddings: bool
    lora_rows: dict[str, int]
    num_blocks: int
    block_size: int
    memory: dict[str, int]
    embedding_digests: dict[str, dict[str, str]] = {}


class CoreFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The core can't start; one line that says what to do. The process ends after it."""

    message: str
    code: str


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural log of a token's probability before temperature and filters."""

    token_id: int
    logprob: float


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step brought for one sample of one request.

    prompt_logprobs  once, in the first output of sample 0, which then comes before those of the
                     other samples: None for the first token, then as logprobs
    logprobs         one entry per token of token_ids when asked for: the sampled token first,
                     then the most likely tokens in falling order
    finish_reason    "stop" (an end or stop token), "length", "abort" or "error"
    stop_token_id    the token that ended it, when finish_reason is "stop"; it is the last of
                     token_ids, and not part of the text
    error            code and words when finish_reason is "error"
    """

    request_id: str
    token_ids: list[int]
    sample_index: int = 0
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error_code: str | None = None
    error: str | None = None


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All outputs of one step."""

    outputs: list[SequenceOutput]


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request was not taken, or was ended from outside (adapter unloaded)."""

    request_id: str
    code: str
    message: str
    status: int


class ResidentAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """One version as this worker sees it. tier "disk"; state absent|loading|resident|draining."""

    lora_id: str
    tier: str
    state: str
    max_rank: int
    num_rows: dict[str, int]
    num_leases: int
    num_claims: int
    pinned: bool = False


class CoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since start and gauges of now; the one door for operators, metrics and tests."""

    num_steps: int
    num_tokens_computed: int
    num_tokens_generated: int
    num_steps_with_several_adapters: int
    num_steps_with_several_chunks: int
    max_adapters_in_step: int
    num_running_seqs: int
    num_waiting_seqs: int
    num_blocks: int
    num_free_blocks: int
    lora_rows: dict[str, int]
    free_lora_rows: dict[str, int]
    running_lora_ids: list[str]
    waiting_lora_ids: list[str]
    adapters: list[ResidentAdapter]
    num_adapter_loads: int
    num_adapter_evictions: int
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_cached_blocks: int = 0


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one forward with a base row, a second base row and an adapter row has shown.

    has_effect   the adapter's row differs from the base's by more than the two base rows do
    is_finite    no logit of the adapter's row is NaN or infinite; logit_gap is 0 if one is
    logit_gap    largest difference of two logits, adapter against base
    noise        the same, base against base
    """

    has_effect: bool
    is_finite: bool
    logit_gap: float
    noise: float


class CallDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The call with this id succeeded."""

    call_id: str
    status: CoreStatus | None = None
    probe: ProbeResult | None = None


class CallFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The call with this id failed and changed nothing."""

    call_id: str
    code: str
    message: str
    status: int
    problems: list[str] = []


Event = CoreProgress | CoreReady | CoreFailed | StepDone | RequestFailed | CallDone | CallFailed
