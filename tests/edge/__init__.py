"""The data plane, tested with bytes on sockets."""
