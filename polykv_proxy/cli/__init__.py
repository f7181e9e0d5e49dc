"""The ``polykv-proxy`` command: arguments in, one call out, errors as one line.

``main`` finds the command; each group of commands has a module, with its arguments and what it calls. Modules
that do the work are imported when their command runs, so that ``--help`` answers at once.
"""

from polykv_proxy.cli.main import main

__all__ = ["main"]
