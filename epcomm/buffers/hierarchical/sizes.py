"""Make the specifications of the two buffers of which a hierarchical one consists."""

from __future__ import annotations

from dataclasses import replace

from epcomm.spec import BufferSpec, HostLayout


def hosts_of(spec: BufferSpec) -> HostLayout:
    """Return where the ranks run, which a plan has found."""
    assert spec.hosts is not None, "lacks() refuses ranks whose hosts are not known"
    return spec.hosts


def num_places(hosts: HostLayout) -> int:
    """Return the number of ranks of each host."""
    return hosts.world_size // hosts.num_hosts


def outer_spec(spec: BufferSpec) -> BufferSpec:
    """Return the specification between hosts, where a rank has the experts of its whole host.

    Each of its ranks is on another host.
    """
    hosts = hosts_of(spec)
    return replace(
        spec,
        num_local_experts=spec.num_local_experts * num_places(hosts),
        expert_alignment=1,
        batches_in_flight=None,
        hosts=HostLayout.of(range(hosts.num_hosts)),
    )


def inner_spec(spec: BufferSpec) -> BufferSpec:
    """Return the specification inside a host, whose tokens are rows that came from all hosts."""
    most = spec.max_tokens_per_rank
    return replace(
        spec,
        max_tokens_per_rank=None if most is None else most * hosts_of(spec).num_hosts,
        hosts=None,
    )


def hosts_lack(spec: BufferSpec) -> tuple[str, ...]:
    """Return the reasons why hosts do not allow a hierarchical exchange; none if they do."""
    hosts = spec.hosts
    if hosts is None or hosts.num_hosts == 1:
        return (
            "needs ranks on several hosts, and these are on one or it is not known; give an "
            "EPGroup a two-dimensional DeviceMesh of (hosts, ranks of a host)",
        )
    if not hosts.is_even:
        sizes = " and ".join(str(len(ranks)) for ranks in hosts.ranks_of_host)
        return (f"hosts have {sizes} ranks, expected the same number on each",)
    if any(list(ranks) != sorted(ranks) for ranks in zip(*hosts.ranks_of_host, strict=True)):
        return (
            f"needs hosts whose ranks of one local index are in the order of hosts, not {hosts}",
        )
    if num_places(hosts) == 1:
        return ("hosts have one rank each, so relaying saves no rows",)
    return ()
