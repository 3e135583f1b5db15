"""The socket that a server listens on: held before a model is loaded, listened on when there is an engine.

Its errors say which option to change. Knows no HTTP.
"""

from __future__ import annotations

import errno
import socket

from mini_sglang.server.config import ServerConfig

_BACKLOG = 2048  # connections that wait to be accepted, the same as uvicorn's


def bind(config: ServerConfig) -> socket.socket:
    """Make a socket that holds the address but does not listen yet. Raises OSError, naming the option to change."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise _refused(config, error) from error
    return listener


def listen(listener: socket.socket, config: ServerConfig) -> None:
    """Listen before uvicorn does: with uvloop it reports no error if another server has come to listen there.

    Raises OSError as `bind` does.
    """
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _refused(config, error) from error


def _refused(config: ServerConfig, error: OSError) -> OSError:
    """The system's error about the address, and the option that chooses another."""
    taken = error.errno in (errno.EADDRINUSE, errno.EACCES)  # the latter for ports below 1024
    advice = "choose another --port (0: a free one)" if taken else "--host must be an address of this machine"
    return OSError(f"cannot listen at {address_of(config, config.port)}: {error.strerror or error}; {advice}")


def address_of(config: ServerConfig, port: int) -> str:
    """The address as it is written in a URL."""
    return f"[{config.host}]:{port}" if ":" in config.host else f"{config.host}:{port}"
