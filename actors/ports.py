"""Ports for processes that must be told one before they listen."""

import socket


def free_port(host: str) -> int:
    """One that is free at this address now. Another process may take it before it is listened at."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port
