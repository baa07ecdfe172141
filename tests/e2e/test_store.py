"""The key-value store and real clients of PyTorch's TCPStore: the newest, from
this interpreter, and the oldest, from the distribution's own Python."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from store_client_checks import CHECKS, NEEDS

CLIENTS = {"newest": sys.executable, "oldest": "/usr/bin/python3"}
PROGRAM = pathlib.Path(__file__).with_name("store_client_checks.py")
VALIDATE = bytes.fromhex("00CEF7853C")


class Store:
    """A running store_serve."""

    def __init__(self, build: pathlib.Path, *args: str, **popen: Any) -> None:
        self.process = subprocess.Popen(
            [build / "tests" / "tools" / "store_serve", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **popen,
        )
        assert self.process.stdout
        line = self.process.stdout.readline().split()
        self.port = int(line[1]) if line else 0

    def connect(self, host: str = "127.0.0.1") -> socket.socket:
        sock = socket.create_connection((host, self.port), timeout=10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def stop(self) -> tuple[int, str]:
        """Close its stdin, which ends it; its exit code and what it complained of."""
        _, err = self.process.communicate(timeout=10)
        return self.process.returncode, err

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rss_kb(self) -> int:
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    def cpu_seconds(self) -> float:
        stat = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text()
        fields = stat.rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_sanitized(self) -> bool:
        exe = pathlib.Path(f"/proc/{self.process.pid}/exe")
        return b"__asan_init" in exe.read_bytes()


@pytest.fixture
def store(build: pathlib.Path) -> Iterator[Store]:
    s = Store(build)
    yield s
    assert s.stop() == (0, "")


def string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def receive(sock: socket.socket, n: int) -> bytes:
    out = b""
    while len(out) < n:
        more = sock.recv(n - len(out))
        if not more:
            raise EOFError(f"closed after {out!r}")
        out += more
    return out


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def num_keys(sock: socket.socket) -> int:
    sock.sendall(b"\x07")
    return int(struct.unpack("<q", receive(sock, 8))[0])


def greeted(store: Store, host: str = "127.0.0.1") -> socket.socket:
    sock = store.connect(host)
    sock.sendall(VALIDATE + b"\x0d\x01\x02\x03\x04")
    assert receive(sock, 4) == b"\x01\x02\x03\x04"
    return sock


@dataclass
class Run:
    """What one client process reported."""

    reason_to_skip: str | None = None
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)
    stderr: str = ""


def run_client(build: pathlib.Path, python: str, log: pathlib.Path) -> Run:
    run = Run()
    with log.open("w") as err:
        try:
            s = Store(build)
            child = subprocess.Popen(
                [python, PROGRAM, str(s.port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                # torch looks its server's address up backwards at each connect
                env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"},
            )
        except FileNotFoundError:
            run.reason_to_skip = f"no {python}"
            return run
        assert child.stdin and child.stdout
        for line in child.stdout:
            report = json.loads(line)
            if report["name"] == "waiting":
                s.stop()
                child.stdin.write("\n")
                child.stdin.flush()
            elif report["name"] == "ended":
                run.ended = report
            else:
                run.checks[report["name"]] = report
        child.communicate(timeout=30)
        if s.process.poll() is None:
            s.stop()
    run.stderr = log.read_text()
    if "No module named 'torch'" in run.stderr:
        run.reason_to_skip = f"{python} has no torch"
    return run


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {}


@pytest.fixture(params=CLIENTS)
def client_run(
    request: pytest.FixtureRequest,
    runs: dict[str, Run],
    build: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """One process per interpreter makes all checks: importing torch takes seconds."""
    name = request.param
    if name not in runs:
        log = tmp_path_factory.mktemp("store") / f"{name}.err"
        runs[name] = run_client(build, CLIENTS[name], log)
    run = runs[name]
    if run.reason_to_skip:
        pytest.skip(run.reason_to_skip)
    return run


@pytest.mark.parametrize("name", CHECKS)
def test_a_real_client_finds_what_it_expects(client_run: Run, name: str) -> None:
    report = client_run.checks.get(name)
    assert report, f"the client ended before this check:\n{client_run.stderr[-4000:]}"
    if report["skipped"]:
        pytest.skip(f"this client has no {NEEDS[name]}")
    assert not report["error"], report["error"]


def test_waiting_clients_fail_at_once_when_the_store_closes(client_run: Run) -> None:
    assert client_run.ended, client_run.stderr[-4000:]
    assert client_run.ended["errors"] == 4
    assert client_run.ended["seconds"] < 1


def test_one_port_serves_both_loopback_addresses(store: Store) -> None:
    a = greeted(store)
    a.sendall(b"\x01" + string(b"/k") + string(b"v"))
    assert num_keys(a) == 1
    try:
        b = greeted(store, "::1")
    except OSError:
        pytest.skip("this machine has no ::1")
    assert num_keys(b) == 1


def test_a_port_that_is_taken_on_either_address_is_refused(
    build: pathlib.Path, store: Store
) -> None:
    second = Store(build, "--port", str(store.port))
    code, err = second.stop()
    assert code == 1
    assert "Address already in use" in err

    with socket.socket(socket.AF_INET6) as other:
        try:
            other.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no ::1")
        other.listen()
        third = Store(build, "--port", str(other.getsockname()[1]))
        code, err = third.stop()
        assert code == 1
        assert "Address already in use" in err


def test_a_port_is_free_again_as_soon_as_the_store_ended(build: pathlib.Path) -> None:
    first = Store(build)
    sock = greeted(first)
    assert first.stop() == (0, "")
    assert is_closed(sock)
    again = Store(build, "--port", str(first.port))
    assert again.port == first.port
    assert again.stop() == (0, "")


def test_requests_cut_at_every_byte_are_understood(store: Store) -> None:
    sock = store.connect()
    for byte in VALIDATE + b"\x01" + string(b"/k") + string(b"v") + b"\x03" + string(b"/k"):
        sock.sendall(bytes([byte]))
        time.sleep(0.0005)
    assert receive(sock, 9) == string(b"v")


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        VALIDATE + b"\xff",
        VALIDATE + b"\x01" + struct.pack("<Q", 1 << 40),
        VALIDATE + b"\x06" + struct.pack("<Q", 1 << 62),
    ],
    ids=["http", "tls", "unknown", "huge key", "huge list"],
)
def test_strangers_are_shut_out_and_nobody_else_notices(store: Store, words: bytes) -> None:
    friend = greeted(store)
    stranger = store.connect()
    stranger.sendall(words)
    assert is_closed(stranger)
    assert num_keys(friend) == 0


def test_deleting_in_the_oldest_dialect_needs_no_further_byte(store: Store) -> None:
    sock = store.connect()
    sock.sendall(b"\x00" + string(b"/k") + string(b"v"))
    start = time.monotonic()
    for expected in (1, 0):
        sock.sendall(b"\x08" + string(b"/k"))
        assert struct.unpack("<q", receive(sock, 8))[0] == expected
    assert time.monotonic() - start < 1


def test_appending_in_the_dialect_of_2_1_may_come_in_two_segments(store: Store) -> None:
    sock = store.connect()
    sock.sendall(b"\x08" + string(b"/k"))
    sock.sendall(string(b"v") + b"\x02" + string(b"/k"))
    assert receive(sock, 9) == string(b"v")


def test_a_reader_that_stops_stalls_nobody_and_holds_little(store: Store) -> None:
    big = bytes(4 << 20)
    friend, stalled = greeted(store), greeted(store)
    friend.sendall(b"\x01" + string(b"/big") + string(big))
    assert num_keys(friend) == 1
    stalled.setblocking(False)
    get = (b"\x03" + string(b"/big")) * 64
    sent = 0
    try:
        while sent < 16 << 20:
            sent += stalled.send(get)
    except BlockingIOError:
        pass
    for _ in range(1000):
        assert num_keys(friend) == 1
    if not store.is_sanitized():
        assert store.rss_kb() < 64 << 10
    stalled.setblocking(True)
    stalled.settimeout(10)
    for _ in range(10):  # it was only slow: all it asked for is still coming
        assert receive(stalled, 8 + len(big)) == string(big)


def set_big(sock: socket.socket, n: int) -> None:
    sock.sendall(b"\x01" + string(b"/big") + string(bytes(n)))
    assert num_keys(sock) == 1


def ping_seconds(sock: socket.socket) -> float:
    start = time.monotonic()
    sock.sendall(b"\x0d\x01\x02\x03\x04")
    assert receive(sock, 4) == b"\x01\x02\x03\x04"
    return time.monotonic() - start


PIPELINER = """
import socket, sys, threading
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
get = b"\\x03" + (4).to_bytes(8, "little") + b"/big"
sock.sendall(bytes.fromhex("00CEF7853C"))
def ask():
    while True:
        sock.sendall(get * 5000)
threading.Thread(target=ask, daemon=True).start()
room = bytearray(4 << 20)
got = 0
try:
    while n := sock.recv_into(room):
        if got < 64 << 20 <= got + n:
            print("reading", flush=True)
        got += n
except ConnectionError:
    pass
"""


def test_a_client_that_pipelines_large_replies_delays_nobody(store: Store) -> None:
    friend = greeted(store)
    set_big(friend, 8 << 20)
    greedy = subprocess.Popen(
        [sys.executable, "-c", PIPELINER, str(store.port)], stdout=subprocess.PIPE
    )
    try:
        assert greedy.stdout and greedy.stdout.readline() == b"reading\n"
        worst = 0.0
        end = time.monotonic() + 1
        while time.monotonic() < end:
            worst = max(worst, ping_seconds(friend))
    finally:
        greedy.kill()
        greedy.communicate()
    limit = 0.5 if store.is_sanitized() else 0.1
    assert worst < limit, f"{worst * 1000:.0f} ms"


def test_requests_held_back_are_served_when_the_replies_are_read(store: Store) -> None:
    n = 4 << 20
    sock = greeted(store)
    set_big(sock, n)
    sock.sendall((b"\x03" + string(b"/big")) * 3 + b"\x07")
    for _ in range(3):
        assert receive(sock, 8 + n) == string(bytes(n))
    assert receive(sock, 8) == struct.pack("<q", 1)


def test_many_small_requests_at_once_are_all_answered(store: Store) -> None:
    sock = greeted(store)
    count = 5000  # many bursts
    sock.sendall((b"\x04" + string(b"/n") + struct.pack("<q", 1)) * count)
    got = receive(sock, 8 * count)
    assert struct.unpack(f"<{count}q", got) == tuple(range(1, count + 1))


def test_unread_lists_of_large_values_leave_the_store_to_others(store: Store) -> None:
    friend = greeted(store)
    set_big(friend, 8 << 20)
    idle = []
    for _ in range(24):
        sock = greeted(store)
        sock.sendall(b"\x0a" + struct.pack("<Q", 32) + string(b"/big") * 32)
        idle.append(sock)
    ping_seconds(friend)
    if not store.is_sanitized():
        assert store.rss_kb() < 512 << 10
    friend.sendall(b"\x01" + string(b"/other") + string(bytes(8 << 20)))
    assert num_keys(friend) == 2
    friend.sendall(b"\x03" + string(b"/other"))
    assert receive(friend, 8 + (8 << 20)) == string(bytes(8 << 20))
    for _ in range(32):
        assert receive(idle[0], 8 + (8 << 20)) == string(bytes(8 << 20))


def test_a_reply_does_not_wait_for_the_last_one_to_be_acknowledged(store: Store) -> None:
    friend, sock = greeted(store), greeted(store)
    start = time.monotonic()
    for i in range(50):
        key = string(b"/k%d" % i)
        # Without TCP_NODELAY the byte that ends the wait would stay behind until
        # the reply to the ping is acknowledged, which this side delays.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
        sock.sendall(b"\x0d\x01\x02\x03\x04" + b"\x06" + struct.pack("<Q", 1) + key)
        assert receive(sock, 4) == b"\x01\x02\x03\x04"
        friend.sendall(b"\x01" + key + string(b""))
        assert receive(sock, 1) == b"\0"
    assert time.monotonic() - start < 50 * 0.010


def test_requests_in_two_segments_are_answered_at_once(store: Store) -> None:
    sock = greeted(store)
    start = time.monotonic()
    for _ in range(50):
        sock.sendall(b"\x0d\x01\x02")
        sock.sendall(b"\x03\x04")
        assert receive(sock, 4) == b"\x01\x02\x03\x04"
    assert time.monotonic() - start < 50 * 0.010


def test_a_client_may_leave_in_the_middle_of_a_doubtful_request(store: Store) -> None:
    before = store.descriptors()
    for _ in range(10):
        with store.connect() as sock:
            sock.sendall(b"\x08" + string(b"/k"))
            time.sleep(0.002)
    time.sleep(0.05)  # the time after which the doubt would have been settled
    assert store.descriptors() == before


def test_running_out_of_descriptors_costs_no_time(build: pathlib.Path) -> None:
    import resource

    s = Store(build)
    friend = greeted(s)
    resource.prlimit(s.process.pid, resource.RLIMIT_NOFILE, (s.descriptors(), 64))
    late = s.connect()
    late.sendall(VALIDATE + b"\x07")
    used = s.cpu_seconds()
    time.sleep(0.5)
    assert s.cpu_seconds() - used < 0.1
    assert num_keys(friend) == 0
    resource.prlimit(s.process.pid, resource.RLIMIT_NOFILE, (64, 64))
    assert receive(late, 8) == bytes(8)
    assert s.stop() == (0, "")


def test_clients_that_die_leave_no_descriptor_behind(store: Store) -> None:
    friend = greeted(store)
    before = store.descriptors()
    for i in range(50):
        sock = greeted(store)
        sock.sendall(b"\x06" + struct.pack("<Q", 1) + string(b"/never"))
        if i % 2:  # a reset that the store sees together with a request
            store.process.send_signal(signal.SIGSTOP)
            sock.sendall(b"\x01" + string(b"/k") + string(b"v"))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        store.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 5
    while store.descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.descriptors() == before
    assert num_keys(friend) == 1


def test_more_connections_than_descriptors_are_answered_with_a_refusal(
    build: pathlib.Path,
) -> None:
    import resource

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    s = Store(build, preexec_fn=few)
    socks = []
    refused = 0
    for _ in range(200):
        sock = s.connect()
        sock.sendall(VALIDATE + b"\x07")
        try:
            receive(sock, 8)
            socks.append(sock)
        except (EOFError, ConnectionResetError):
            refused += 1
    assert refused > 100
    assert len(socks) >= 16
    socks.pop().close()
    deadline = time.monotonic() + 5
    while True:
        sock = s.connect()
        sock.sendall(VALIDATE)
        try:
            sock.sendall(b"\x07")
            receive(sock, 8)
            break
        except (EOFError, OSError):
            assert time.monotonic() < deadline
    assert num_keys(socks[0]) == 0
    assert s.stop() == (0, "")
