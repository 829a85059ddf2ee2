"""forward.py FD HOST PORT: lead connections to the listening socket FD, of whatever network, to HOST:PORT."""

import asyncio
import contextlib
import socket
import sys

CHUNK_BYTES = 1 << 16


async def main(listener: socket.socket, host: str, port: int) -> None:
    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(host, port)
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        writer.close()

    async with await asyncio.start_server(meet, sock=listener) as server:
        await server.serve_forever()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
