#!/usr/bin/env python3
"""A llama-server that does what files in its script folder say; standard library only, starts fast.

Files (in the folder named by the variable SCRIPT_DIR, read when they matter, written by tests):

    boot_error     printed and followed by exit status 1, instead of listening
    hold           while it exists, /health answers 503
    health_status  the status /health answers once loaded, instead of 200
    hang           while it exists, nothing is answered
    ignore_term    SIGTERM is counted but not obeyed
    speak          bytes written to standard output when ready

It appends a line to ``starts`` (its pid) when it starts and to ``terms`` for every SIGTERM.
"""

import os
import signal
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

SCRIPT = Path(os.environ["SCRIPT_DIR"])


def note(name, text):
    """Append a line to a file of the script folder."""
    with (SCRIPT / name).open("a") as file:
        file.write(f"{text}\n")


class Handler(BaseHTTPRequestHandler):
    """Answers /health."""

    protocol_version = "HTTP/1.1"

    def address_string(self):
        """A Unix peer has no address to name."""
        return "unix"

    def log_message(self, *args):
        """Stay quiet."""

    def do_GET(self):
        """Any GET is /health."""
        while (SCRIPT / "hang").exists():
            time.sleep(0.01)
        status = SCRIPT / "health_status"
        code = 503 if (SCRIPT / "hold").exists() else int(status.read_text()) if status.exists() else 200
        body = b'{"status":"ok"}'
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(socketserver.ThreadingUnixStreamServer):
    """Does not wait for open connections when it ends."""

    daemon_threads = True


def main():
    """Play the script."""
    note("starts", os.getpid())
    error = SCRIPT / "boot_error"
    if error.exists():
        print(error.read_text(), file=sys.stderr)
        raise SystemExit(1)
    server = None

    def on_term(*_):
        note("terms", "term")
        if not (SCRIPT / "ignore_term").exists():
            threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, on_term)
    server = Server(sys.argv[sys.argv.index("--host") + 1], Handler)
    if (SCRIPT / "speak").exists():
        print((SCRIPT / "speak").read_text(), flush=True)
    server.serve_forever(poll_interval=0.02)


main()
