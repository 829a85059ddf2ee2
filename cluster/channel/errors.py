"""What can become of a channel."""

from cluster.errors import UserError


class ChannelError(Exception):
    """The message did not get through. But for `DeadlineExceeded`, the channel is of no more use: open a new one."""


class ChannelClosed(ChannelError):  # noqa: N818 - they name what happened
    """One of the two sides closed or aborted it."""


class PeerDied(ChannelError):  # noqa: N818
    """The peer's process ended, or the connection to it, without a goodbye."""


class DeadlineExceeded(ChannelError):  # noqa: N818
    """Not within the deadline. Nothing was sent or received, and the channel is as good as before."""


class ChannelCorrupted(ChannelError):  # noqa: N818
    """The peer wrote what no channel of ours writes."""


class ChannelUnavailable(UserError):  # noqa: N818
    """This kind of channel can't be had here."""
