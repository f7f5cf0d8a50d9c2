"""The environment that a core's process is started in."""

import os

# How long an idle thread of the matrix library spins before it sleeps. The runtime's own default,
# a spin of many milliseconds, is for machines that do nothing else: beside a server, a gateway and
# a client on the same cores, the spinning threads take the time of those that have work.
SPIN_COUNT = "2000"


def core_environment() -> dict[str, str]:
    """Return this process's environment, with a short spin unless the operator has set one."""
    chosen = os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    return {**os.environ} if chosen else {**os.environ, "GOMP_SPINCOUNT": SPIN_COUNT}
