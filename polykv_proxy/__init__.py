"""polykv-proxy: a reverse proxy and control plane in front of llama-server.

The package is cut by what each part may know. ``core`` decides: plain values in, plain values out,
no I/O, no clock (``now`` is an argument), one synchronous step per event. ``runtime`` owns the one
stateful object of the core and carries out what it decides. ``engine`` knows llama-server, ``edge``
knows HTTP/1.1 bytes, ``api`` joins both to routes, ``app`` puts everything together.

The event loop is the lock: every method of the control plane is a plain ``def`` and therefore atomic.
"""

__version__ = "0.1.0"
