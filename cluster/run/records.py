"""Append-only files of framed records: what was written whole is read back whole, a torn tail is recognised.

    file   = MAGIC, record, record, ...
    record = MARK, length, crc32 of the payload, payload

A process may die, or a disk fill up, at any byte. Reading stops at the first record that is not whole; everything
before it is sound, everything from there on was never promised.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from cluster.errors import BrokenPromise

MAGIC = b"RLEARN1\n"
_MARK = 0x5244_4E45
_HEADER = struct.Struct("<III")


def sync_folder(folder: Path) -> None:
    """Make new, renamed and removed names in the folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append_bytes(handle: int, data: bytes, at: int, path: Path) -> int:
    """Write data behind offset `at` (the end of the file) and return the new end.

    A write that fails half way is taken back, so that a later one does not stand behind torn bytes.
    """
    view = memoryview(data)
    written = 0
    try:
        while written < len(view):
            written += os.write(handle, view[written:])
    except OSError as error:
        os.ftruncate(handle, at)
        raise BrokenPromise(
            f"{path} cannot be written: {error.strerror} (after {at} bytes). What a round produced must be on disk "
            "before it counts; free space there, then resume."
        ) from error
    return at + written


def whole_records(path: Path) -> Iterator[tuple[int, bytearray]]:
    """(offset of the payload, payload) of every whole record, up to the first that is torn or damaged."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            mark, length, checksum = _HEADER.unpack(header)
            if mark != _MARK:
                return
            start = file.tell()
            if length > os.fstat(file.fileno()).st_size - start:
                return
            payload = bytearray(length)
            if file.readinto(payload) != length or zlib.crc32(payload) != checksum:
                return
            yield start, payload


class RecordFile:
    """One file of records, open for appending; a torn tail is cut off when it is opened."""

    def __init__(self, path: Path) -> None:
        """Create the file, or take up an existing one after its last whole record."""
        self.path = path
        self.found: list[tuple[int, bytearray]] = []
        """Records that were there already; whoever opened the file takes and clears them."""
        self.torn_bytes = 0
        """Bytes behind the last whole record that had to be cut off."""
        fresh = not path.exists()
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._unsynced = 0
        if not fresh:
            self.found = list(whole_records(path))
        self._end = self.found[-1][0] + len(self.found[-1][1]) if self.found else len(MAGIC)
        size = os.fstat(self._handle).st_size
        if size < len(MAGIC) or (not self.found and os.pread(self._handle, len(MAGIC), 0) != MAGIC):
            self.torn_bytes = size
            os.ftruncate(self._handle, 0)
            self._end = append_bytes(self._handle, MAGIC, 0, path)
        elif size > self._end:
            self.torn_bytes = size - self._end
            os.ftruncate(self._handle, self._end)
        os.fsync(self._handle)
        sync_folder(path.parent)

    def append(self, payload: bytes) -> int:
        """Hand one record to the operating system (it outlives this process) and return its payload's offset."""
        header = _HEADER.pack(_MARK, len(payload), zlib.crc32(payload))
        start = self._end + len(header)
        self._end = append_bytes(self._handle, header + payload, self._end, self.path)
        self._unsynced += 1
        return start

    def read(self, start: int, length: int) -> bytearray:
        """The payload at an offset that `append` or `found` gave."""
        payload = bytearray(length)
        view = memoryview(payload)
        while view:
            count = os.preadv(self._handle, [view], start + length - len(view))
            if count == 0:
                raise BrokenPromise(f"{self.path} ends before byte {start + length}: somebody else has changed it.")
            view = view[count:]
        return payload

    @property
    def unsynced(self) -> int:
        """Records a power cut could still take."""
        return self._unsynced

    def sync(self) -> None:
        """Bring everything appended so far onto the disk."""
        if self._unsynced:
            os.fdatasync(self._handle)
            self._unsynced = 0

    def close(self) -> None:
        """Sync and close; twice does no harm."""
        if self._handle >= 0:
            self.sync()
            os.close(self._handle)
            self._handle = -1
