"""All benchmarks, one after the other: ``python -m tests.benchmarks`` (``make bench``)."""

import subprocess
import sys

for name in (
    "fanout",
    "relay",
    "matching",
    "attach",
    "status",
    "rates",
    "leaving",
    "admission",
    "ramp",
    "catalogue",
    "durable",
    "saving",
    "reading",
):
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], check=True)
