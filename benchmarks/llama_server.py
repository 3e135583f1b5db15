"""llama.cpp's server as a peer: its command, and when it is ready. How to build it: docs/benchmarking.md."""

from __future__ import annotations

import http.client
import socket
import subprocess
import time

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def command(program: str, model: str, port: int, *options: str) -> list[str]:
    return [program, "--model", model, "--host", HOST, "--port", str(port), *options]


def wait(process: subprocess.Popen[str], port: int) -> None:
    """Return when the server has loaded its model. Raises RuntimeError if it ends instead."""
    while process.poll() is None:
        connection = http.client.HTTPConnection(HOST, port)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.HTTPStatus.OK:
                return
        except (OSError, http.client.HTTPException):  # it does not listen yet
            pass
        finally:
            connection.close()
        time.sleep(0.01)
    raise RuntimeError(f"{process.args!r} ended with status {process.returncode} instead of serving")
