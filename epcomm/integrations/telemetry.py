"""Export the statistics of a model's layers as named numbers, and as text for Prometheus."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from epcomm.calls.order import Calls
from epcomm.group import EPGroup
from epcomm.layers import named_expert_parallel_layers
from epcomm.routing.gates import replayed_gates
from epcomm.routing.replay import ReplayCounts
from epcomm.stats import EPStats


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of this rank, by the rules of Prometheus for names and labels.

    help: the meaning, one sentence.
    """

    name: str
    labels: Mapping[str, str]
    value: float
    help: str

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        """The kind by the name: a counter only grows; a gauge may rise and fall."""
        return "counter" if self.name.endswith("_total") else "gauge"


# Name -> the field of EPStats, which has one value or a value for each expert, and help.
_OF_LAYERS = {
    "epcomm_calls_total": ("num_calls", "Forward passes of the layer."),
    "epcomm_tokens_total": ("num_tokens", "Tokens that the rank dispatched."),
    "epcomm_rows_total": ("num_rows", "Rows that the rank received."),
    "epcomm_expert_tokens_total": (
        "num_tokens_per_expert",
        "Tokens that an expert of the rank computed.",
    ),
    "epcomm_expert_imbalance": (
        "imbalance",
        "Most tokens of an expert of the rank over their mean, since construction.",
    ),
    "epcomm_max_slots": (
        "max_slots",
        "Most (token, expert) pairs that the rank computed in one call.",
    ),
}
# Field of ReplayCounts -> help.
_OF_REPLAYS = {
    "num_tokens": "Tokens of the rank with replayed experts.",
    "num_tokens_that_differ": "Tokens of these whose live choice lacks a replayed expert.",
    "num_entries": "Replayed experts of the tokens of the rank.",
    "num_entries_that_differ": "Replayed experts that the live choice lacks.",
}


def metrics(model: nn.Module) -> list[Metric]:
    """Return the statistics of the expert-parallel layers of `model` on this rank.

    Layers that replayed routes have their counts too, by the name of the block, see ReplayCounts.

    Labels: `group`, numbered among those of the model, and `rank` in it, on all; `layer`, the name
    of its module; `expert`, an index among those of the rank. Bytes are counted by buffers, for all
    layers and models on the group, so they have `backend` and `direction` (dispatch, combine,
    control) instead. Metrics of one name follow one another.

    Local.   Host sync: yes, one a layer.
    """
    layers = named_expert_parallel_layers(model)
    groups = list(dict.fromkeys(layer.group for layer in layers.values()))
    labels_of = {g: {"group": str(n), "rank": str(g.rank)} for n, g in enumerate(groups)}
    taken = [({**labels_of[e.group], "layer": name}, e.stats()) for name, e in layers.items()]
    found = [
        metric
        for name in _OF_LAYERS
        for labels, stats in taken
        for metric in _of_layer(name, labels, stats)
    ]
    found += _of_replays(model, {group.calls: labels for group, labels in labels_of.items()})
    return found + [metric for group in groups for metric in _sent_bytes(group, labels_of[group])]


def as_prometheus_text(found: Iterable[Metric]) -> str:
    """Return metrics in the text format of Prometheus, version 0.0.4.

    found: metrics of one name follow one another, as metrics() returns them.
    """
    lines, last = list[str](), None
    for metric in found:
        if metric.name != last:
            lines.append(f"# HELP {metric.name} {metric.help}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
        last = metric.name
        labels = ",".join(f'{name}="{_escaped(text)}"' for name, text in metric.labels.items())
        lines.append(f"{metric.name}{{{labels}}} {metric.value}")
    return "".join(f"{line}\n" for line in lines)


def _of_layer(name: str, labels: Mapping[str, str], stats: EPStats) -> Iterator[Metric]:
    field, text = _OF_LAYERS[name]
    read = getattr(stats, field)
    is_by_expert = isinstance(read, tuple)
    for expert, value in enumerate(read if is_by_expert else (read,)):
        own = {**labels, "expert": str(expert)} if is_by_expert else labels
        yield Metric(name=name, labels=own, value=float(value), help=text)


def _of_replays(model: nn.Module, labels_of: Mapping[Calls, Mapping[str, str]]) -> Iterator[Metric]:
    taken = [
        ({**labels_of[gate.calls], "layer": name}, ReplayCounts.of(gate.replayed))
        for name, gate in replayed_gates(model).items()
        if gate.replayed is not None
    ]
    for field, text in _OF_REPLAYS.items():
        for labels, counts in taken:
            yield Metric(
                name=f"epcomm_replayed_{field.removeprefix('num_')}_total",
                labels=labels,
                value=float(getattr(counts, field)),
                help=text,
            )


def _sent_bytes(group: EPGroup, labels: Mapping[str, str]) -> Iterator[Metric]:
    for backend, traffic in group.traffic().items():
        for direction in ("dispatch", "combine", "control"):
            yield Metric(
                name="epcomm_sent_bytes_total",
                labels={**labels, "backend": backend, "direction": direction},
                value=float(getattr(traffic, f"{direction}_bytes")),
                help="Bytes that the rank sent to other ranks, forward and backward.",
            )


def _escaped(text: str) -> str:
    """Escape the value of a label, which stands between quotes."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
