"""What an engine is told at start; every field has one meaning and one unit."""

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one engine core. Travels as JSON on the core's command line.

    model                a local HF directory, a `.gguf` file, or a hub id
    served_model_name    the public base id; None means the name found in the checkpoint
    dtype                "auto" (the checkpoint's own, fp16 as bf16), "bf16" or "fp32"
    max_model_len        tokens of prompt and answer together; None means the checkpoint's
    device               "cpu" or "cuda": of the devices that CUDA_VISIBLE_DEVICES shows, the one
                         that falls to worker_index when workers are dealt over them in turn
    memory_bytes         for KV blocks and arena rows together; None means measured: on a CPU
                         min(4 GiB, half of what is available), on CUDA 0.90 of what is free
                         on the device, divided by the workers on it
    worker_index         which of the workers that are started together on this machine, in order
    num_workers          how many those are
    state_dir            where converted checkpoints and arena images may be written
    num_threads          of the matrix library; None means all cores
    kernels              beside the base products: "auto" (numba or Triton where they run well),
                         "numba", "triton" or "torch"
    attention            on CUDA: "auto" (FlashInfer's where it is installed and fits the model,
                         else ours), "triton" (ours) or "flashinfer"
    scheduling           who waits for whom: "fair" (by priority, then least served) or "fcfs"
    """

    model: str
    state_dir: str
    served_model_name: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_tokens_per_step: int = 512
    max_waiting_seqs: int = 1024
    block_size: int = 16
    memory_bytes: int | None = None
    worker_index: int = 0
    num_workers: int = 1
    enable_lora: bool = True
    num_threads: int | None = None
    kernels: str = "auto"
    attention: str = "auto"
    scheduling: str = "fair"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_tokens_per_step", "max_waiting_seqs", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if not 0 <= self.worker_index < self.num_workers:
            raise ValueError(
                f"worker_index must be between 0 and {self.num_workers - 1}, "
                f"not {self.worker_index}"
            )
        if self.dtype not in {"auto", "bf16", "fp32"}:
            raise ValueError(f"dtype must be auto, bf16 or fp32, not {self.dtype!r}")
        if self.device not in {"cpu", "cuda"}:
            raise ValueError(f"device must be cpu or cuda, not {self.device!r}")
        if self.kernels not in {"auto", "numba", "triton", "torch"}:
            raise ValueError(f"kernels must be auto, numba, triton or torch, not {self.kernels!r}")
        if self.attention not in {"auto", "triton", "flashinfer"}:
            raise ValueError(
                f"attention must be auto, triton or flashinfer, not {self.attention!r}"
            )
        if self.scheduling not in {"fair", "fcfs"}:
            raise ValueError(f"scheduling must be fair or fcfs, not {self.scheduling!r}")
