"""gRPC's settings on both ends of a member's stream."""

from typing import Final

MAX_MESSAGE_BYTES: Final = 16 << 20
"""The facts of a model of a hundred layers, with all its backends, take some 100 KiB."""

_KEEPALIVE_MS: Final = 10_000
"""A host that is gone doesn't close its connections: a ping that isn't answered tells."""

CLIENT_KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_KEEPALIVE: Final = (
    *CLIENT_KEEPALIVE,
    # Or it takes a member's pings for abuse, and ends a connection that is quiet between two of them.
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)

_SIZES: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

SERVER_OPTIONS: Final = (
    *_SIZES,
    *SERVER_KEEPALIVE,
    # A second coordinator at the same address would take every other member.
    ("grpc.so_reuseport", 0),
)

CLIENT_OPTIONS: Final = (
    *_SIZES,
    *CLIENT_KEEPALIVE,
    # A member that is started beside its coordinator tries again soon.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
