"""``python -m polykv_proxy`` is the ``polykv-proxy`` command."""

from polykv_proxy.cli import main

if __name__ == "__main__":
    main()
