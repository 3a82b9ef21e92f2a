"""One lock for all engines of the process."""

from __future__ import annotations

from threading import Lock
from typing import Final

#: While a graph is captured, waiting for the whole device is an error in every thread, and can end
#: the capture; PyTorch's allocator then refuses to return memory. So captures hold this lock, and
#: so do such calls.
CAPTURE_LOCK: Final = Lock()
