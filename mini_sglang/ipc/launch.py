"""Starts the engine's process, and waits until its model is loaded.

It imports little, so that the process starts first and loads beside whatever else this one has to import. It knows the
socket and the process, and no request.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile

import msgspec
import zmq
import zmq.asyncio

from mini_sglang.config import EngineConfig
from mini_sglang.ipc import messages


class LaunchedEngine:
    """An engine's process that has been started, and this side of the socket to it. Made by `launch`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        context: zmq.asyncio.Context,
        socket: zmq.asyncio.Socket,
        directory: str,
    ) -> None:
        self.process = process
        self.context = context
        self.socket = socket
        self._directory = directory  # of the socket

    async def ready(self) -> messages.EngineInfo:
        """Wait until the model is loaded.

        Raises ValueError if the engine says that a setting or the model is wrong, RuntimeError if it cannot start.
        """
        first = asyncio.ensure_future(self.socket.recv())
        ended = asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait((first, ended), return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                await asyncio.wait((first,), timeout=0.2)  # a message sent just before the end
            if not first.done():
                status = self.process.returncode
                raise RuntimeError(f"the engine process ended with status {status} while starting; see its log")
            message = messages.decode_from_engine(first.result())
        finally:
            first.cancel()
            ended.cancel()
        shutil.rmtree(self._directory, ignore_errors=True)  # both ends are connected: the name has done its work
        if isinstance(message, messages.Fatal):
            if message.is_setting:
                raise ValueError(message.error)
            raise RuntimeError(f"the engine could not start: {message.error}")
        assert isinstance(message, messages.Ready)
        return message.info

    async def kill(self) -> None:
        """End the process by force, and close the socket."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self.context.destroy(linger=0)
        await kill(self.process)


async def launch(config: EngineConfig) -> LaunchedEngine:
    """Start an engine's process; it ends when the thread that called this ends, at the latest.

    Raises OSError if the folder for temporary files is wrong.
    """
    directory = tempfile.mkdtemp(prefix="mini-sglang-")  # mode 0700: nobody else can connect
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.PAIR)
        address = f"ipc://{directory}/engine"
        try:
            socket.bind(address)
        except zmq.ZMQError as error:  # a path of more than about a hundred characters
            raise OSError(f"no socket in {directory}: {error}; set TMPDIR to a shorter path") from error
        return LaunchedEngine(await _spawn(address, config), context, socket, directory)
    except BaseException:
        context.destroy(linger=0)
        shutil.rmtree(directory, ignore_errors=True)
        raise


async def _spawn(address: str, config: EngineConfig) -> asyncio.subprocess.Process:
    """Start the process and hand it its configuration."""
    command = (sys.executable, "-m", "mini_sglang.ipc.engine_process", address, str(os.getpid()))
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config))
    process.stdin.close()
    return process


async def kill(process: asyncio.subprocess.Process) -> None:
    """End a process by force, unless it has ended."""
    if process.returncode is None:
        process.kill()
    await process.wait()
