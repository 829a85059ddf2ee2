"""What the rounds with a draft in another process took, as Prometheus families."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cluster.speculation.rounds import RoundReport


class RoundCollector(Collector):
    """Of one report.

    Between CPUs a round's parts are fuse, encode, transfer, draft and decode. Between GPUs, where a stream waits, they
    are fuse, and a wait that is transfer and draft together: the draft's own time doesn't travel, and would be called
    transfer otherwise.
    """

    def __init__(self, report: RoundReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        times = self._report.times
        yield CounterMetricFamily("dspark_rounds", "Rounds that the draft has answered.", times.rounds)
        seconds = CounterMetricFamily("dspark_round_seconds", "Time of rounds, by part.", labels=["part"])
        for part in ("fuse", "encode", "transfer", "draft", "decode", "wait"):
            seconds.add_metric([part], getattr(times, part))
        yield seconds
        sent = CounterMetricFamily("dspark_channel_bytes", "Bytes between target and draft.", labels=["direction"])
        sent.add_metric(["to_draft"], times.request_bytes)
        sent.add_metric(["to_target"], times.reply_bytes)
        yield sent
        yield GaugeMetricFamily("dspark_draft_lost", "Whether the target goes on alone.", float(self._report.lost))
        yield CounterMetricFamily("dspark_draft_losses", "Drafts that were lost.", self._report.losses)
        resting = float(self._report.resting)
        yield GaugeMetricFamily("dspark_drafts_resting", "Whether drafts aren't asked for, as they don't pay.", resting)
        yield CounterMetricFamily("dspark_draft_rests", "Times that drafts were switched off.", self._report.rests)
        yield GaugeMetricFamily("dspark_pairing_epoch", "Epoch of the pair.", self._report.epoch)
