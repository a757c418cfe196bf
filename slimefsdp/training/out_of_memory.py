"""Telling that memory ran out, and with how many tokens at work.

Inside of a rank the error stays what torch raises: a typed one says that all ranks raised alike, and memory may be
short on one alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# of RuntimeErrors: torch's allocators, and libraries that allocate beside them
_WORDS = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")
TOKENS = "micro_batch_tokens"
"""An attribute that such an error gets."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, the host or Python had no memory to give."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


@contextmanager
def at_work_on(tokens: int) -> Iterator[None]:
    """Has an error of memory that leaves the block know the size of the micro-batch it came from.

    Args:
        tokens: of this rank.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            setattr(error, TOKENS, tokens)
        raise
