"""The memory of a core that is started again."""

import msgspec
import pytest

from engine.config import EngineConfig
from engine.protocol import CoreReady
from engine.server.core_supervisor import as_first_measured


def ready(budget_bytes: int) -> CoreReady:
    fields = dict.fromkeys(CoreReady.__struct_fields__)
    return CoreReady(**{**fields, "memory": {"budget_bytes": budget_bytes}})


@pytest.mark.parametrize(("given", "taken"), [(None, 5 << 30), (3 << 30, 3 << 30)])
def test_is_what_the_first_one_took(given, taken):
    config = EngineConfig(model="m", state_dir="s", memory_bytes=given)
    later = as_first_measured(config, ready(5 << 30))
    assert later == msgspec.structs.replace(config, memory_bytes=taken)
    assert as_first_measured(later, ready(1 << 30)) == later
