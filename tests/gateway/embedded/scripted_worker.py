"""Stands in for engine.server: the same command line and JSON lines, no model behind it.

`behaviour` in its configuration: serve, refuse (say `failed`), crash (end without a word),
stubborn (ignore SIGTERM), babble (write what isn't JSON, then serve). Every one that serves starts
a process of its own, as a worker starts its core.
"""

import json
import os
import signal
import subprocess
import sys
import threading

CORE = "import sys; sys.stdin.read()"


def say(**fields):
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def end_with_parent():
    sys.stdin.read()
    os._exit(0)


def main():
    config = json.loads(sys.argv[sys.argv.index("--config") + 1])
    behaviour = config["behaviour"]
    say(event="progress", text="loading the model")
    if behaviour == "refuse":
        say(event="failed", message="GPTQ checkpoints aren't served", code="unsupported_model")
        sys.exit(1)
    if behaviour == "crash":
        sys.exit("ImportError: no module named torch")
    if behaviour == "babble":
        sys.stdout.write("not JSON\n" + "x" * 2_000_000 + "\n[1]\n")
    stop = threading.Event()
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    core = subprocess.Popen([sys.executable, "-S", "-c", CORE], stdin=subprocess.PIPE)
    threading.Thread(target=end_with_parent, daemon=True).start()
    say(event="ready", address="http://127.0.0.1:1", base_id="tiny", core_pid=core.pid)
    stop.wait()


if __name__ == "__main__":
    main()
