"""The figures of several processes on one page of Prometheus: each process's own page, its samples labelled."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

LABEL: Final = "replica"

_BEGINNING: Final = "_created"
"""Of what tells when a counter began: a family of its own in a page's text, and a sample of the counter's elsewhere."""


def federated(own: Iterable[Metric], pages: Mapping[str, str | None]) -> Iterator[Metric]:
    """This process's families, with the samples of each replica's page in them, or beside them, by name.

    A page that is None is missing, and `dspark_replica_up` says so.
    """
    families: dict[str, Metric] = {}
    for metric in own:
        _family(families, metric).samples.extend(metric.samples)
    up = GaugeMetricFamily("dspark_replica_up", "Whether a replica's figures are on this page.", labels=[LABEL])
    for replica, page in pages.items():
        up.add_metric([replica], float(page is not None))
        for metric in text_string_to_metric_families(page or ""):
            if metric.name.endswith(_BEGINNING):
                continue
            labelled = (each._replace(labels={LABEL: replica, **each.labels}) for each in metric.samples)
            _family(families, metric).samples.extend(labelled)
    yield from families.values()
    yield up


def _family(families: dict[str, Metric], like: Metric) -> Metric:
    """A name may have one family on a page. It is a new one: some collectors give the same object each time."""
    if like.name not in families:
        families[like.name] = Metric(like.name, like.documentation, like.type, like.unit)
    return families[like.name]
