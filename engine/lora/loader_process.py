"""The loader process: reads, checks and casts adapter files, so that the core never has to.

Jobs come on stdin, one result each goes to stdout (loader_messages.py). Ends, whatever it is
doing, when stdin ends: the core has gone.
"""

import hashlib
import os
import queue
import re
import sys
import threading
from pathlib import Path

import msgspec

from adapters.digest import adapter_digest
from adapters.limits import MAX_CONFIG_BYTES
from adapters.manifest import allows_no_effect
from adapters.peft_format import CONFIG_NAME
from adapters.validate import inspect_directory
from adapters.weight_files import weight_files
from engine.lora.arena_image import (
    UNFINISHED_SUFFIX,
    ImageBroken,
    ImageHeader,
    build_image,
    read_header,
)
from engine.lora.loader_messages import (
    FrameBuffer,
    LoadBroken,
    LoadDone,
    LoadJob,
    LoadRefused,
    LoadResult,
    encode_frame,
)
from engine.lora.number_formats import NumberOutOfRange

READ_BYTES = 64 * 1024
# Below the core, which has tokens to compute.
NICENESS = 5
MAX_STEM_CHARS = 100


def run(job: LoadJob) -> LoadResult:
    """Lay one adapter out, or find the image that an earlier run has left for the same files."""
    directory, image_dir = Path(job.directory), Path(job.image_dir)
    try:
        image_dir.mkdir(parents=True, exist_ok=True)
        path = image_dir / image_name(job)
        header = _existing(path, job.dtype)
        if header is not None:
            return _done(job, path, header)
        remove_unfinished(image_dir)
        inspection = inspect_directory(
            directory, job.base, allow_no_effect=allows_no_effect(directory)
        )
        if inspection.adapter is None:
            return LoadRefused(lora_id=job.lora_id, problems=inspection.problems)
        header = build_image(
            inspection.adapter,
            path,
            content_digest=adapter_digest(inspection.adapter),
            dtype=job.dtype,
        )
        if image_dir / image_name(job) != path:
            path.unlink()
            message = f"the files of adapter {job.lora_id!r} changed while they were read"
            return LoadBroken(lora_id=job.lora_id, message=message)
    except NumberOutOfRange as error:
        return LoadRefused(lora_id=job.lora_id, problems=(str(error),))
    except OSError as error:
        # strerror, since the full text names a path of this machine.
        message = f"the files of adapter {job.lora_id!r} can't be laid out: {error.strerror}"
        return LoadBroken(lora_id=job.lora_id, message=message)
    return _done(job, path, header)


def image_name(job: LoadJob) -> str:
    """Return the name of the image of exactly these files, for this base, in this number format.

    A lora_id of the registry carries a digest, but one from elsewhere may come back with other
    weights: so the files themselves are part of the name.
    """
    hashed = hashlib.sha256()
    directory = Path(job.directory)
    hashed.update(msgspec.json.encode([job.lora_id, job.directory, job.dtype, job.base.identity]))
    config = directory / CONFIG_NAME
    weights = weight_files(directory) if directory.is_dir() else ()
    for path in (config, *weights):
        if path.is_file():
            stat = path.stat()
            facts = [path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            hashed.update(msgspec.json.encode(facts))
    if config.is_file():
        with config.open("rb") as file:
            hashed.update(file.read(MAX_CONFIG_BYTES))
    stem = re.sub(r"[^A-Za-z0-9._@-]", "_", job.lora_id)[:MAX_STEM_CHARS]
    return f"{stem}.{hashed.hexdigest()[:16]}.arena"


def remove_unfinished(image_dir: Path) -> None:
    """Delete what loaders that are no more have left half written."""
    for path in image_dir.glob(f".*{UNFINISHED_SUFFIX}"):
        pid = path.name.removesuffix(UNFINISHED_SUFFIX).rpartition(".")[2]
        if pid.isdecimal() and not _is_alive(int(pid)):
            path.unlink(missing_ok=True)


def main() -> None:
    """Answer jobs until stdin ends."""
    os.nice(NICENESS)
    # Whatever a library prints must not get between the frames.
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0) as results:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        jobs: queue.SimpleQueue[LoadJob] = queue.SimpleQueue()
        threading.Thread(target=_read_jobs, args=(jobs,), daemon=True).start()
        while True:
            results.write(encode_frame(_run_guarded(jobs.get())))


def _run_guarded(job: LoadJob) -> LoadResult:
    try:
        return run(job)
    except Exception as error:  # noqa: BLE001 - one adapter's surprise must not cost the others
        message = f"adapter {job.lora_id!r} can't be laid out: {type(error).__name__}"
        sys.excepthook(type(error), error, error.__traceback__)
        return LoadBroken(lora_id=job.lora_id, message=message)


def _read_jobs(jobs: "queue.SimpleQueue[LoadJob]") -> None:
    frames = FrameBuffer()
    while piece := os.read(sys.stdin.fileno(), READ_BYTES):
        for body in frames.feed(piece):
            jobs.put(msgspec.msgpack.decode(body, type=LoadJob))
    os._exit(0)


def _existing(path: Path, dtype: str) -> ImageHeader | None:
    """Return the header of an image that is there and whole."""
    try:
        header = read_header(path)
    except ImageBroken:
        return None
    return header if header.dtype == dtype else None


def _done(job: LoadJob, path: Path, header: ImageHeader) -> LoadDone:
    return LoadDone(
        lora_id=job.lora_id,
        image_path=str(path),
        content_digest=header.content_digest,
        num_rows=header.num_rows,
        max_rank=header.max_rank,
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main()
