"""The supervisor's control socket and the pages it hands out, as a program sees them that
knows nothing of libaccel: base/page.h and rendezvous/messages.h in Python."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEALS = 1 | 2 | 4  # seal, shrink, grow

PAGE_SIZE = 4096
PAGE_MAGIC = 0x4147506C65636361
RING_MAGIC = 0x474E526C65636361
CONTROL_PAGE = struct.Struct("=QII16sIIIIiIQIIQ")
RING_PAGE = struct.Struct("=QIIQ16sIIQQQQ")
VERSION_AT, OWNER_AT, STOP_AT, STATE_AT, STEP_AT = 8, 40, 64, 68, 72

MSG_PAGE_ASK, MSG_PAGE = 17, 18
HEADER = struct.Struct(">BBHII")
WIRE_VERSION = 1
DESCRIPTORS_MAX = 16


@dataclass(frozen=True)
class ControlPage:
    """struct control_page as it was when it was read."""

    magic: int
    version: int
    size: int
    nonce: bytes
    rank: int
    attempt: int
    owner: int
    n_cores: int
    ring_fd: int
    reserved: int
    ring_inode: int
    stop: int
    state: int
    step: int


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def seals(fd: int) -> int:
    return fcntl.fcntl(fd, F_GET_SEALS)


class Pages:
    """The descriptors of one rank: its control page, and the ring where there is one."""

    def __init__(self, fds: list[int]) -> None:
        self.fds = fds
        self.page_fd = fds[0]
        self.ring_fd = fds[1] if len(fds) > 1 else None
        self._map = mmap.mmap(self.page_fd, PAGE_SIZE)

    def control(self) -> ControlPage:
        return ControlPage(*CONTROL_PAGE.unpack_from(self._map))

    def set_step(self, step: int) -> None:
        struct.pack_into("=Q", self._map, STEP_AT, step)

    def close(self) -> None:
        self._map.close()
        for fd in self.fds:
            os.close(fd)

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def path_of(jobs: Path) -> str:
    """The control socket of the only job below a runtime folder."""
    (found,) = (jobs / "accel").glob("*.sock")
    return str(found)


def name_of(path: str) -> str:
    """The abstract name that belongs to a control socket."""
    return "\0" + path


def connect(address: str) -> socket.socket:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.settimeout(10)
    s.connect(address)
    return s


def ask(s: socket.socket, rank: int) -> tuple[int, list[int]]:
    """The errno that the supervisor answers with, and the descriptors that came."""
    body = struct.pack(">I", rank)
    s.send(HEADER.pack(WIRE_VERSION, 0, MSG_PAGE_ASK, 0, len(body)) + body)
    room = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)
    packet, ancillary, flags, _ = s.recvmsg(4096, room)
    assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
    if not packet:
        raise ConnectionResetError("the supervisor hung up")
    fds = array.array("i")
    for level, kind, data in ancillary:
        assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        fds.frombytes(data)
    version, _, kind, _, length = HEADER.unpack_from(packet)
    assert (version, kind, length) == (WIRE_VERSION, MSG_PAGE, len(packet) - HEADER.size)
    error, answered = struct.unpack_from(">iI", packet, HEADER.size)
    assert answered == rank
    return error, list(fds)


def pages(address: str, rank: int) -> Pages:
    """Those of a rank that runs."""
    with connect(address) as s:
        error, fds = ask(s, rank)
    assert not error, os.strerror(error)
    return Pages(fds)
