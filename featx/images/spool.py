"""The spool: encoded images that the process of the model has read for its decoders."""

from __future__ import annotations

import os
import queue
from collections import Counter
from collections.abc import Iterable

from featx.images.decoder_channels import BUFFER_SHIFT, NO_BUFFER
from featx.images.shared_memory import anonymous_file


class Spool:
    """A few buffers in an anonymous file, each with the encoded images of a group.

    Args:
        num_buffers: number of buffers, which limits how far images are read ahead.

    Attributes:
        file: descriptor of the file.
    """

    def __init__(self, num_buffers: int) -> None:
        self.file = anonymous_file("featx-spool")
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._num_users: Counter[int] = Counter()
        for buffer in range(num_buffers):
            self._free.put(buffer)

    def write(self, images: Iterable[bytes]) -> int:
        """Wait for a free buffer, write encoded images into it, and return its number.

        After `end_waiting` nothing is written, and the number is NO_BUFFER.
        """
        buffer = self._free.get()
        if buffer == NO_BUFFER:
            return buffer
        self._num_users[buffer] = 1
        offset = buffer << BUFFER_SHIFT
        for data in images:
            view = memoryview(data)
            while view:  # a write ends early after 2 GiB
                written = os.pwrite(self.file, view, offset)
                offset, view = offset + written, view[written:]
        return buffer

    def share(self, buffer: int, num_groups: int) -> None:
        """Let further groups use a buffer, so that it is released that many times more."""
        self._num_users[buffer] += num_groups

    def release(self, buffer: int) -> None:
        """Let a buffer be used again when all of its groups are done."""
        self._num_users[buffer] -= 1
        if not self._num_users[buffer]:
            self._free.put(buffer)

    def end_waiting(self, num_threads: int) -> None:
        """Wake threads that wait for a free buffer, when their groups are no longer needed."""
        for _ in range(num_threads):
            self._free.put(NO_BUFFER)
