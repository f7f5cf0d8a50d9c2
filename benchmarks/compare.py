"""How does it compare? The same requests to Loraplex and to other systems, one after the other.

Each round starts every system in turn, in an order that rotates from round to round, with a pause
between; a level's figure is its median over the rounds. `make bench-peers` makes the peers'
environments and runs this. What was measured is kept in results/compare-<date>.json after each
start; `--resume` goes on with such a file, with other peers, workloads or more rounds if wanted.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import compare_figures as figures
import httpx
from compare_levels import measure_batches, measure_server
from compare_plot import draw
from compare_workloads import Group, Prompts, Scale, groups, write_adapters
from peers.llama_cpp import LlamaCpp
from peers.loraplex import STATE_DIR, Loraplex
from peers.openvino import OpenVino
from peers.peer import PEERS_DIR, Adapter, BatchPeer, Peer, Setup
from peers.peft import Peft
from peers.server import ServerPeer
from peers.vllm import Vllm, VllmWithPreloads
from provenance import describe_run
from report import describe

from engine.model.gguf import convert_gguf
from gateway.embedded.default_model import find_default_model

HERE = Path(__file__).resolve().parent
PEERS: dict[str, type[Peer]] = {
    peer.key: peer for peer in (Loraplex, Vllm, VllmWithPreloads, LlamaCpp, OpenVino, Peft)
}
TITLES = {key: peer.title for key, peer in PEERS.items()}
WORKLOADS = tuple(name for group in groups(Scale(concurrencies=(1,))) for name in group.workloads)
QUICK = {"prompt_tokens": 32, "output_tokens": 8, "prefix_tokens": 96, "num_cold": 2}
NUM_THREADS = 2
COLD_SEED = 10_000
EVERYTHING = "everything"
FAILURES = (RuntimeError, OSError, subprocess.SubprocessError, httpx.HTTPError)


class Comparison:
    """Runs the starts that are wanted and not yet in `result`, and keeps it on disk."""

    def __init__(self, result: dict[str, Any], path: Path, scale: Scale) -> None:
        self.result = result
        self._path = path
        self._scale = scale
        self._gguf = find_default_model()
        self._model_dir = convert_gguf(self._gguf, models_dir=PEERS_DIR / "models", progress=print)
        self._prompts = Prompts(self._model_dir)
        # Loraplex keeps what it has been given, and adapters that come in cold must be new to it.
        shutil.rmtree(STATE_DIR, ignore_errors=True)

    def run(self, *, peers: list[str], workloads: tuple[str, ...], num_rounds: int) -> None:
        """Measure round by round; a start that fails is said, and its system left out."""
        self._make_files([PEERS[key] for key in peers], workloads, num_rounds)
        for number in range(1, num_rounds + 1):
            first = (number - 1) % max(1, len(peers))
            for key in [*peers[first:], *peers[:first]]:
                self._run_peer(PEERS[key], number, workloads)

    def _make_files(
        self, peers: list[type[Peer]], workloads: tuple[str, ...], num_rounds: int
    ) -> None:
        """Write all that any start will read, so that no disk is busy with it later."""
        for peer in peers:
            for group, _ in self._starts(peer, workloads):
                try:
                    peer.make_files(self._setup(group, peer))
                except FAILURES as error:
                    self._leave_out(peer, group.name, str(error))
        for number in range(1, num_rounds + 1):
            self._cold_adapters(number)
        os.sync()

    def _starts(
        self, peer: type[Peer], workloads: tuple[str, ...]
    ) -> Iterator[tuple[Group, tuple[str, ...]]]:
        """The groups that a peer is started for, each with the workloads wanted of it."""
        if (why := peer.missing()) is not None:
            self._leave_out(peer, EVERYTHING, why)
            return
        for name in workloads:
            if name in peer.cannot:
                self._leave_out(peer, name, peer.cannot[name])
        for group in groups(self._scale):
            wanted = peer.workloads(tuple(name for name in group.workloads if name in workloads))
            if wanted and not self._is_left_out(peer, group.name):
                yield group, wanted

    def _run_peer(self, peer: type[Peer], number: int, workloads: tuple[str, ...]) -> None:
        for group, wanted in self._starts(peer, workloads):
            if not self._is_done(peer, group, number, wanted):
                print(f"round {number}, {peer.title}, {group.name}", flush=True)
                self._run_group(peer, group, number, wanted)

    def _is_done(
        self, peer: type[Peer], group: Group, number: int, wanted: tuple[str, ...]
    ) -> bool:
        return any(
            (record["peer"], record["group"], record["round"]) == (peer.key, group.name, number)
            and set(wanted) <= set(record["workloads"])
            for record in self.result["records"]
        )

    def _run_group(
        self, peer: type[Peer], group: Group, number: int, wanted: tuple[str, ...]
    ) -> None:
        setup = self._setup(group, peer)
        seed = f"round {number}"  # the same prompts for every system
        common = {"workloads": wanted, "prompts": self._prompts, "scale": self._scale}
        time.sleep(self._scale.pause_s)
        try:
            if issubclass(peer, ServerPeer):
                cold = self._cold_adapters(number)
                with peer(setup) as server:
                    measured = measure_server(server, group, cold=cold, seed=seed, **common)
            else:
                assert issubclass(peer, BatchPeer)
                measured = measure_batches(peer, setup, seed=seed, **common)
        except FAILURES as error:
            self._leave_out(peer, group.name, str(error))
            return
        about = {
            "round": number,
            "peer": peer.key,
            "group": group.name,
            "workloads": list(wanted),
            "commit": self.result["commit"],
        }
        self.result["records"].append(about | measured)
        self._write()

    def _cold_adapters(self, number: int) -> tuple[Adapter, ...]:
        return write_adapters(
            self._scale.num_cold,
            lora_ranks=(16,),
            model_dir=self._model_dir,
            first_seed=COLD_SEED + number * self._scale.num_cold,
        )

    def _setup(self, group: Group, peer: type[Peer]) -> Setup:
        logs = PEERS_DIR / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return Setup(
            gguf=self._gguf,
            model_dir=self._model_dir,
            adapters=write_adapters(
                group.num_adapters, lora_ranks=group.lora_ranks, model_dir=self._model_dir
            ),
            num_kv_tokens=group.num_kv_tokens,
            max_model_len=group.max_model_len,
            max_num_seqs=self._scale.max_concurrency,
            num_threads=NUM_THREADS,
            log=logs / f"{peer.key}-{group.name}.log",
        )

    def _is_left_out(self, peer: type[Peer], what: str) -> bool:
        return any(
            (one["peer"], one["what"]) == (peer.key, what) for one in self.result["left_out"]
        )

    def _leave_out(self, peer: type[Peer], what: str, why: str) -> None:
        if not self._is_left_out(peer, what):
            print(f"left out: {peer.title}, {what}: {why}", flush=True)
            line = {"peer": peer.key, "what": what, "why": why.splitlines()[-1]}
            self.result["left_out"].append(line)
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(self.result, indent=2) + "\n")


def report(result: dict[str, Any]) -> str:
    """Everything that a reader wants to see, in Markdown."""
    records = result["records"]
    found = figures.cells(records)
    parts = [
        f"{describe(result)}.",
        figures.ratio_table(found, TITLES),
        figures.speed_table(found, TITLES),
        figures.prefix_table(found, TITLES),
        figures.cold_table(records, TITLES),
        figures.start_table(records, TITLES),
        figures.flag_list(records, TITLES),
        figures.left_out_list(result["left_out"], TITLES),
    ]
    return "\n\n".join(part for part in parts if part)


def main() -> None:
    """Measure, write, print."""
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers end with us
    now = datetime.now(UTC)
    scale = Scale(concurrencies=tuple(args.concurrency))
    if args.quick:
        scale = Scale(concurrencies=tuple(args.concurrency), num_pairs=1, pause_s=0, **QUICK)
    path = args.resume or HERE / "results" / f"compare-{now:%Y-%m-%dT%H%M}.json"
    if args.quick and args.resume is None:
        path = PEERS_DIR / "quick.json"
    result = describe_run(now, libraries=("torch", "transformers", "peft"))
    result |= {"scale": {name: getattr(scale, name) for name in scale.__dataclass_fields__}}
    result |= {"left_out": [], "records": []}
    if args.resume is not None:
        result["records"] = json.loads(args.resume.read_text())["records"]
    comparison = Comparison(result, path, scale)
    comparison.run(
        peers=args.peers,
        workloads=tuple(args.workloads),
        num_rounds=1 if args.quick else args.rounds,
    )
    text = report(result)
    print(text)
    draw(figures.cells(result["records"]), TITLES, path.with_suffix(".svg"))
    if args.update_readme:
        figures.update_readme(HERE / "README.md", text)
    print(f"written to {path} and .svg")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="measure Loraplex beside other systems")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a round of 8 tokens; says nothing")
    parser.add_argument("--resume", type=Path, metavar="JSON", help="go on with this result")
    parser.add_argument("--update-readme", action="store_true", help="put the tables in README.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
