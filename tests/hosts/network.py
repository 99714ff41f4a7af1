"""Simulated hosts: network namespaces of this machine, connected by a bridge.

    host 0: eth0 10.77.0.1 --+
    host 1: eth0 10.77.0.2 --+-- bridge in a separate namespace

A host also has its own name and shared memory, so that programs find several machines. The network
of the machine does not change and concurrent runs do not interfere, because all interfaces are in
namespaces and end with them. A namespace is named after the process that made it; if that process
could not remove it, the next run does.
"""

import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

# The interface of a host to the others, for example for GLOO_SOCKET_IFNAME.
INTERFACE = "eth0"
# Latency of a token bucket filter, and its burst: what a host that was idle sends at once. With a
# burst as long as a message, each message after a computation would take no time.
LATENCY, BURST_S, BURST_LIMITS = "100ms", 0.005, (2**14, 2**18)
# Bytes of a packet: jumbo frames, as between hosts of a cluster. Here the cores that compute also
# process the packets, which network adapters do elsewhere.
MTU = 9000
_NAME = re.compile(r"epcomm-(\d+)-[\w-]+")
# Runs a command with $0 as the host name.
_FURNISH = 'hostname "$0" && mount -t tmpfs shm /dev/shm && exec "$@"'
# Disable IPv6, because the kernel would send IPv6 announcements, which would be counted. The file
# is missing without IPv6.
_WITHOUT_IPV6 = (
    "for it in /proc/sys/net/ipv6/conf/*/disable_ipv6; do [ ! -w $it ] || echo 1 >$it; done"
)
# Flags of clone(2) for the network and the host name.
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
# Seconds for one command of `ip` or `tc`, which take milliseconds.
_COMMAND_LIMIT_S = 20
# Seconds until killed processes are gone.
_KILL_LIMIT_S = 10


class HostsError(Exception):
    """This machine does not permit simulated hosts; the message has the reason."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A simulated host.

    address: the address of its interface, by which the other hosts reach it.
    """

    number: int
    namespace: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` on this host."""
        inside = ["unshare", "--uts", "--mount", "sh", "-c", _FURNISH, self.name]
        return ["nsenter", f"--net={self.path}", *inside, *words]

    @property
    def name(self) -> str:
        """The host name that processes on this host see."""
        return f"host{self.number}"

    @property
    def path(self) -> str:
        return f"/run/netns/{self.namespace}"

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Move the calling thread to the network of this host; forked processes stay there."""
        caller = os.getpid()
        with open("/proc/thread-self/ns/net", "rb") as home, open(self.path, "rb") as there:
            _call_libc("setns", there.fileno(), _CLONE_NEWNET)
            try:
                yield
            finally:
                if os.getpid() == caller:
                    _call_libc("setns", home.fileno(), _CLONE_NEWNET)

    def take_name(self) -> None:
        """Set the host name of this process permanently, as command() does."""
        _call_libc("unshare", _CLONE_NEWUTS)
        socket.sethostname(self.name)

    def unplug(self) -> None:
        """Disconnect the host; neither side is notified."""
        _in(self.namespace, f"link set {INTERFACE} down")

    def kill_all(self) -> None:
        """Kill every process on this host, as a loss of power would."""
        _kill_all(self.namespace)


@cache
def missing() -> str:
    """Return the reason why this machine cannot make hosts, or ''."""
    absent = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if absent:
        return f"no program {', '.join(absent)} (packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return f"namespaces need root, and this is user {os.geteuid()}"
    try:
        with make_hosts(1, rate="1gbit") as (host,):
            _run(host.command(["true"]))
    except HostsError as error:
        return str(error)
    return ""


@contextmanager
def make_hosts(num_hosts: int, *, rate: str | None = None) -> Iterator[list[Host]]:
    """Make hosts that reach each other; remove them and all their processes at the end.

    Args:
        num_hosts: how many.
        rate: the bandwidth of each, such as `1gbit`; None: as fast as the machine.

    Raises:
        HostsError: a command failed; the message has its output.
    """
    _remove_leftovers()
    maker = os.getpid()
    own = f"epcomm-{maker}-{secrets.token_hex(2)}"
    bridge = f"{own}-bridge"
    hosts = [
        Host(number=number, namespace=f"{own}-{number}", address=f"10.77.0.{number + 1}")
        for number in range(num_hosts)
    ]
    try:
        for namespace in (bridge, *(host.namespace for host in hosts)):
            _run(["ip", "netns", "add", namespace])
            _in(namespace, "link set lo up")
        _in(bridge, "link add bridge type bridge")
        _in(bridge, "link set bridge up")
        for host in hosts:
            _join(host, bridge)
            if rate is not None:
                shaped = f"rate {rate} burst {_burst_of(rate)} latency {LATENCY}".split()
                add = f"qdisc add dev {INTERFACE} root tbf".split()
                _run(["tc", "-n", host.namespace, *add, *shaped])
        yield hosts
    finally:
        # A process that was forked in this context also leaves the host when it ends.
        if os.getpid() == maker:
            for namespace in (*(host.namespace for host in hosts), bridge):
                _remove(namespace)


def sent_bytes() -> int:
    """Return the bytes that the interface of the calling process's host has sent so far.

    What TCP sends again is left out: it does where a core is busy and an answer comes late.
    """
    # /proc shows the namespace of the process.
    with open("/proc/self/net/snmp", encoding="ascii") as file:
        names, values = (line.split() for line in file if line.startswith("Tcp:"))
    again = MTU * int(values[names.index("RetransSegs")])
    with open("/proc/self/net/dev", encoding="utf-8") as file:
        for line in file:
            name, _, counts = line.partition(":")
            if name.strip() == INTERFACE:
                return int(counts.split()[8]) - again
    raise HostsError(f"this process has no interface {INTERFACE}; it runs on no host")


def _burst_of(rate: str) -> int:
    """Return the bytes of a burst at a rate such as `1gbit`."""
    number, unit = rate.removesuffix("bit")[:-1], rate.removesuffix("bit")[-1:]
    bits_per_s = float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit]
    least, most = BURST_LIMITS
    return min(max(int(bits_per_s / 8 * BURST_S), least), most)


def _join(host: Host, bridge: str) -> None:
    port = f"port{host.number}"
    _run(["nsenter", f"--net={host.path}", "sh", "-c", _WITHOUT_IPV6])
    _in(host.namespace, f"link add {INTERFACE} type veth peer name {port}")
    for each in (INTERFACE, port):
        _in(host.namespace, f"link set {each} mtu {MTU}")
    _in(host.namespace, f"link set {port} netns {bridge}")
    _in(bridge, f"link set {port} master bridge up")
    _in(host.namespace, f"addr add {host.address}/24 dev {INTERFACE}")
    _in(host.namespace, f"link set {INTERFACE} up")


def _call_libc(name: str, *arguments: int) -> None:
    # os.setns() and os.unshare() exist since Python 3.12.
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise HostsError(f"{name}() says: {os.strerror(code)}")


def _in(namespace: str, words: str) -> None:
    _run(["ip", "-n", namespace, *words.split()])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=False
    )
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise HostsError(f"`{' '.join(command)}` says: {said}")
    return done.stdout


def _remove_leftovers() -> None:
    """Remove the namespaces of runs that were killed."""
    for line in _run(["ip", "netns", "list"]).splitlines():
        name = line.split()[0]
        if (match := _NAME.fullmatch(name)) and not os.path.exists(f"/proc/{match[1]}"):
            _remove(name)


def _remove(namespace: str) -> None:
    if os.path.exists(f"/run/netns/{namespace}"):
        _kill_all(namespace)
        _run(["ip", "netns", "delete", namespace])


def _kill_all(namespace: str) -> None:
    end_s = time.monotonic() + _KILL_LIMIT_S
    # Repeat, because processes may have been forked in the meantime.
    while pids := _run(["ip", "netns", "pids", namespace]).split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > end_s:
            raise HostsError(f"processes {' '.join(pids)} of {namespace} do not end")
        time.sleep(0.01)
