"""Every kernel compiles for devices that this machine lacks, spills nothing, and stays as lean.

`python -m tests.punica_kernels.test_aot` writes what is needed now to aot_limits.json.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("triton")

from punica_kernels.triton_launch import interpreting
from punica_kernels.triton_tiles import Family
from tests.punica_kernels.aot import Usage, as_text, compile_all
from tests.punica_kernels.aot_launches import all_launches

LIMITS = Path(__file__).with_name("aot_limits.json")
REGISTERS_TO_SPARE = 8  # another version of the compiler may take a few more
SHARED_BYTES = {Family.SM_80: 163 * 1024, Family.SM_90: 227 * 1024, Family.SM_100: 227 * 1024}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(interpreting(), reason="the interpreter compiles nothing"),
]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, dict[str, Usage]]:
    return compiled(tmp_path_factory.mktemp("triton"))


def compiled(folder: Path) -> dict[Family, dict[str, Usage]]:
    return {family: compile_all(all_launches(family), family, folder) for family in Family}


def test_every_kernel_compiles_and_none_spills(
    table: dict[Family, dict[str, Usage]], capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{as_text(table)}\n")
    for family, usages in table.items():
        assert {name: one for name, one in usages.items() if one.local_bytes > 0} == {}
        for name, one in usages.items():
            assert one.shared_bytes <= SHARED_BYTES[family], name


def test_no_kernel_takes_more_than_it_did(table: dict[Family, dict[str, Usage]]) -> None:
    """More registers or shared memory is fewer programs at a time. Meant? Write the limits anew."""
    limits = json.loads(LIMITS.read_text())
    for family, usages in table.items():
        assert list(usages) == list(limits[family]), "a kernel came or went: write the limits anew"
        for name, one in usages.items():
            limit = limits[family][name]
            assert one.registers <= limit["registers"] + REGISTERS_TO_SPARE, (family, name)
            assert one.shared_bytes <= limit["shared_bytes"], (family, name)


def main() -> None:
    """Write the limits."""
    with tempfile.TemporaryDirectory() as folder:
        table = compiled(Path(folder))
    numbers = {
        family: {name: asdict(one) for name, one in usages.items()}
        for family, usages in table.items()
    }
    LIMITS.write_text(json.dumps(numbers, indent=1) + "\n")
    sys.stdout.write(as_text(table) + "\n")


if __name__ == "__main__":
    main()
