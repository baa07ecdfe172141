"""What a real TCPStore client is to find at the store, run by test_store.py.

    PYTHON store_client_checks.py PORT

Runs every check that this interpreter's torch can, one JSON line each, then
waits on keys that never come while its caller stops the store. Needs no pytest:
the oldest client is a distribution's Python, which may not have it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

Check = Callable[["Client"], None]
CHECKS: dict[str, Check] = {}
NEEDS: dict[str, str] = {}


class Client:
    """Makes stores that are connected to the server under test."""

    def __init__(self, port: int) -> None:
        self.port = port

    def store(self, host: str = "127.0.0.1", timeout: float = 20.0) -> Any:
        from torch.distributed import TCPStore

        return TCPStore(
            host,
            self.port,
            world_size=None,
            is_master=False,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )


def check(needs: str = "set") -> Callable[[Check], Check]:
    """Register a check for clients that have the method ``needs``."""

    def register(fn: Check) -> Check:
        CHECKS[fn.__name__] = fn
        NEEDS[fn.__name__] = needs
        return fn

    return register


def seconds(n: float) -> timedelta:
    return timedelta(seconds=n)


def fails(fn: Callable[[], object]) -> str:
    """Call something that must raise; its text."""
    try:
        fn()
    except Exception as e:  # torch raises RuntimeError or a class of its own by release
        return str(e)
    raise AssertionError("no error was raised")


def in_thread(fn: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(fn())
        except Exception as e:
            out.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, out


def join(thread: threading.Thread, out: list[Any]) -> Any:
    thread.join(20)
    assert not thread.is_alive(), "still blocked"
    return out[0]


@check()
def values_and_counters(c: Client) -> None:
    a, b = c.store(), c.store()
    a.set("v", "first")
    a.set("v", "second")
    a.num_keys()  # a set has no reply; this one tells that it was carried out
    assert b.get("v") == b"second"
    assert a.add("n", 5) == 5
    assert b.add("n", -7) == -2
    assert a.add("n", 0) == -2
    assert b.get("n") == b"-2"
    a.set("empty", "")
    assert b.get("empty") == b""


@check()
def keys_and_values_are_bytes(c: Client) -> None:
    a, b = c.store(), c.store()
    key = "k \x00\n\u00e9/" * 10
    a.set(key, "\u20ac\x00tail")
    assert b.get(key) == "\u20ac\x00tail".encode()


@check()
def large_values(c: Client) -> None:
    a, b = c.store(), c.store()
    for n in (1439, 1440, 1441, 65536, 1 << 20, 8 << 20):
        a.set("large", "x" * n)
        a.num_keys()
        got = b.get("large")
        assert len(got) == n and got == b"x" * n
    a.delete_key("large")


@check()
def compare_set(c: Client) -> None:
    a, b = c.store(), c.store()
    assert a.compare_set("cas", "", "1") == b"1"
    assert b.compare_set("cas", "1", "2") == b"2"
    assert a.compare_set("cas", "1", "3") == b"2"
    assert b.get("cas") == b"2"
    assert a.compare_set("cas-none", "expected", "v") == b"expected"
    assert a.delete_key("cas-none") is False


@check()
def deleting_and_counting_keys(c: Client) -> None:
    a = c.store()
    before = a.num_keys()
    a.set("d1", "")
    a.set("d2", "")
    assert a.num_keys() == before + 2
    assert a.delete_key("d1") is True
    assert a.delete_key("d1") is False
    assert a.num_keys() == before + 1
    assert a.delete_key("d2") is True


@check()
def a_get_blocks_until_the_key_is_set(c: Client) -> None:
    a, b = c.store(), c.store()
    job = in_thread(lambda: a.get("later"))
    time.sleep(0.1)
    assert job[0].is_alive()
    b.set("later", "now")
    assert join(*job) == b"now"


@check()
def a_wait_for_several_keys(c: Client) -> None:
    a, b = c.store(), c.store()
    job = in_thread(lambda: a.wait(["w1", "w2", "w1", "w3"]))
    for k in ("w1", "w2"):
        b.set(k, "")
    time.sleep(0.05)
    assert job[0].is_alive()
    b.add("w3", 1)
    assert join(*job) is None
    a.wait([])


@check()
def many_clients_wait_for_one_key(c: Client) -> None:
    waiting = [in_thread(lambda s=c.store(): s.get("many")) for _ in range(32)]
    time.sleep(0.1)
    c.store().set("many", "all")
    assert all(join(*w) == b"all" for w in waiting)


@check()
def a_client_goes_on_after_a_wait_timed_out(c: Client) -> None:
    a, b = c.store(), c.store()
    for i in range(3):
        start = time.monotonic()
        fails(lambda: a.wait([f"never{i}"], seconds(0.2)))
        assert 0.15 < time.monotonic() - start < 5
        assert a.add("after", 1) == i + 1
        b.set(f"never{i}", "too late")
        assert a.get(f"never{i}") == b"too late"


@check("append")
def a_key_that_comes_after_the_timeout_does_no_harm(c: Client) -> None:
    a, b = c.store(), c.store()
    for i in range(3):
        fails(lambda: a.wait([f"late{i}"], seconds(0.2)))
        b.set(f"late{i}", "too late")
        b.num_keys()
        assert a.add("after-late", 1) == i + 1


@check()
def keys_with_a_prefix(c: Client) -> None:
    from torch.distributed import PrefixStore

    a = PrefixStore("outer", PrefixStore("inner", c.store()))
    b = PrefixStore("outer", c.store())
    a.set("k", "v")
    assert a.get("k") == b"v"
    assert c.store().get("inner/outer/k") == b"v"
    b.set("k", "shorter")
    assert b.get("k") == b"shorter"
    assert a.get("k") == b"v"
    assert a.add("n", 2) == 2
    a.wait(["k", "n"])


@check()
def the_name_localhost(c: Client) -> None:
    a = c.store("localhost")
    a.set("by-name", "v")
    assert c.store("127.0.0.1").get("by-name") == b"v"


@check()
def the_ipv6_address(c: Client) -> None:
    import socket

    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return  # this machine has none
    a = c.store("::1")
    a.set("by-6", "v")
    assert c.store("127.0.0.1").get("by-6") == b"v"


@check()
def many_connections_come_and_go(c: Client) -> None:
    for i in range(64):
        assert c.store().add("round", 1) == i + 1


@check()
def a_non_numeric_counter_closes_that_client_only(c: Client) -> None:
    a, b = c.store(), c.store()
    a.set("text", "apples")
    a.num_keys()
    fails(lambda: a.add("text", 1))
    assert b.get("text") == b"apples"


@check("append")
def append(c: Client) -> None:
    a, b = c.store(), c.store()
    a.append("app", "one")
    a.num_keys()
    b.append("app", "two")
    assert b.get("app") == b"onetwo"
    job = in_thread(lambda: a.get("app-later"))
    b.append("app-later", "x")
    assert join(*job) == b"x"


@check("multi_get")
def multi_get_and_multi_set(c: Client) -> None:
    a, b = c.store(), c.store()
    a.multi_set(["m1", "m2", "m3"], ["1", "", "3" * 5000])
    assert b.multi_get(["m3", "m1", "m2"]) == [b"3" * 5000, b"1", b""]
    a.multi_set([], [])
    assert b.multi_get([]) == []
    names = [f"mm{i}" for i in range(3000)]
    a.multi_set(names, names)
    assert b.multi_get(names) == [n.encode() for n in names]
    for n in names:
        a.delete_key(n)


@check("check")
def check_keys(c: Client) -> None:
    a = c.store()
    a.set("c1", "")
    assert a.check(["c1"]) is True
    assert a.check(["c1", "c2"]) is False
    assert a.check([]) is True


@check("queue_push")
def queues(c: Client) -> None:
    a, b = c.store(), c.store()
    for i in range(3):
        a.queue_push("q", f"item{i}")
    assert a.queue_len("q") == 3
    assert b.queue_len("q") == 3
    assert [b.queue_pop("q") for _ in range(3)] == [b"item0", b"item1", b"item2"]
    assert b.queue_len("q") == 0
    fails(lambda: a.queue_pop("q", False))


@check("queue_push")
def pops_block_and_each_item_goes_to_one(c: Client) -> None:
    jobs = [in_thread(lambda s=c.store(): s.queue_pop("bq")) for _ in range(8)]
    a = c.store()
    time.sleep(0.1)
    for i in range(8):
        a.queue_push("bq", str(i))
    assert sorted(join(*j) for j in jobs) == [str(i).encode() for i in range(8)]
    assert a.queue_len("bq") == 0


@check("queue_push")
def a_pop_that_timed_out_takes_nothing(c: Client) -> None:
    a, b = c.store(timeout=0.2), c.store()
    fails(lambda: a.queue_pop("tq"))
    b.queue_push("tq", "v")
    assert b.queue_len("tq") == 1
    assert a.queue_pop("tq") == b"v"


@check("list_keys")
def list_keys(c: Client) -> None:
    a = c.store()
    a.set("listed \u00e9", "")
    keys = a.list_keys()
    assert "listed \u00e9" in keys
    assert len(keys) == a.num_keys()
    a.delete_key("listed \u00e9")
    assert "listed \u00e9" not in a.list_keys()


@check("barrier")
def barriers(c: Client) -> None:
    jobs = [in_thread(lambda s=c.store(): s.barrier("bar", 8)) for _ in range(7)]
    time.sleep(0.1)
    assert all(j[0].is_alive() for j in jobs)
    c.store().barrier("bar", 8)
    assert [join(*j) for j in jobs] == [None] * 7


@check("barrier")
def a_barrier_timeout_counts_as_an_arrival(c: Client) -> None:
    a, b = c.store(timeout=0.2), c.store()
    fails(lambda: a.barrier("tbar", 2))
    b.barrier("tbar", 2)
    a.set("after-barrier", "v")
    assert a.get("after-barrier") == b"v"


@check("clone")
def clone(c: Client) -> None:
    a = c.store()
    b = a.clone()
    job = in_thread(lambda: a.get("cloned"))
    time.sleep(0.05)
    b.set("cloned", "v")
    assert join(*job) == b"v"


@check("has_extended_api")
def a_counted_start_uses_init(c: Client) -> None:
    from torch.distributed import TCPStore

    a = TCPStore("127.0.0.1", c.port, 2, False, seconds(20), True)
    b = TCPStore("127.0.0.1", c.port, 2, False, seconds(20), True)
    a.set("counted", "v")
    assert b.get("counted") == b"v"
    assert len(a.list_keys()) < a.num_keys()  # init/ is counted but not listed


def run(c: Client) -> None:
    from torch.distributed import TCPStore

    for name, fn in CHECKS.items():
        error: str | None = None
        skipped = not hasattr(TCPStore, NEEDS[name])
        if not skipped:
            try:
                fn(c)
            except Exception:
                error = traceback.format_exc()
        print(json.dumps({"name": name, "skipped": skipped, "error": error}), flush=True)


def wait_for_the_end(c: Client) -> None:
    """Wait for keys that never come, and tell how long the others took to fail."""
    clients = [c.store() for _ in range(4)]
    jobs = [in_thread(lambda s=s: s.get("never")) for s in clients]
    time.sleep(0.2)
    print(json.dumps({"name": "waiting"}), flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    results = [join(*j) for j in jobs]
    took = time.monotonic() - start
    print(
        json.dumps(
            {
                "name": "ended",
                "errors": sum(isinstance(r, Exception) for r in results),
                "seconds": took,
            }
        ),
        flush=True,
    )


def main() -> None:
    client = Client(int(sys.argv[1]))
    run(client)
    wait_for_the_end(client)


if __name__ == "__main__":
    main()
