"""Order between the threads and CUDA streams that share blocks. A CPU has nothing to wait for."""

import threading

import torch


class Settling:
    """Blocks that were freed are reused only behind the forwards that still read them.

    The free count is exact at once; a stream that is handed such blocks waits, on the GPU and not
    on the host, for the other streams to get where they were when they freed theirs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._freed: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def stream(self) -> torch.cuda.Stream | None:
        """The stream that this thread launches on; None on a CPU."""
        return torch.cuda.current_stream(self._device) if self._on_gpu else None

    def freed(self, reader: torch.cuda.Stream | None) -> None:
        """Note that blocks are free again, which forwards on ``reader`` may still read."""
        if reader is not None:
            self._freed.setdefault(reader, torch.cuda.Event()).record(reader)

    def reused(self) -> None:
        """Have this thread's stream wait for all who freed blocks on other streams."""
        if not self._freed:
            return
        mine = self.stream()
        for reader, event in list(self._freed.items()):
            if event.query():
                del self._freed[reader]
            elif mine is not None and reader != mine:
                mine.wait_event(event)


class Turn:
    """Scratch blocks belong to all sessions: one layer of one forward uses them at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None

    def take(self, stream: torch.cuda.Stream | None) -> None:
        """Wait, on the GPU, for the stream that used the scratch before. Needs the lock."""
        if stream is not None and stream != self._stream:
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream = stream
