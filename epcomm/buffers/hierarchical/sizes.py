"""The specifications of the outer and the inner buffer of a hierarchical buffer."""

from __future__ import annotations

from dataclasses import replace

from epcomm.spec import BufferSpec, HostLayout


def hosts_of(spec: BufferSpec) -> HostLayout:
    """Return the hosts of a specification that hosts_lack() has checked."""
    assert spec.hosts is not None, "lacks_between() rejects ranks whose hosts are unknown"
    return spec.hosts


def num_places(hosts: HostLayout) -> int:
    """Return the number of ranks of each host."""
    return hosts.world_size // hosts.num_hosts


def outer_spec(spec: BufferSpec) -> BufferSpec:
    """Return the specification of the outer buffer: W is the number of hosts.

    A rank has the experts of its whole host, and each rank is on another host.
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
    """Return the specification of the inner buffer, whose tokens are rows from all hosts."""
    most = spec.max_tokens_per_rank
    return replace(
        spec,
        max_tokens_per_rank=None if most is None else most * hosts_of(spec).num_hosts,
        hosts=None,
    )


def hosts_lack(spec: BufferSpec) -> tuple[str, ...]:
    """Return the reasons why spec.hosts does not allow a hierarchical exchange."""
    hosts = spec.hosts
    if hosts is None or hosts.num_hosts == 1:
        return (
            "needs ranks on several hosts, but they are on one host or their hosts are unknown; "
            "pass EPGroup a two-dimensional DeviceMesh of (hosts, ranks of a host)",
        )
    if not hosts.is_even:
        sizes = " and ".join(str(len(ranks)) for ranks in hosts.ranks_of_host)
        return (f"hosts have {sizes} ranks, expected the same number on each",)
    if any(list(ranks) != sorted(ranks) for ranks in zip(*hosts.ranks_of_host, strict=True)):
        return (f"needs ranks of equal local index in the order of their hosts, not {hosts}",)
    if num_places(hosts) == 1:
        return ("hosts have one rank each, so relaying saves no rows",)
    return ()
