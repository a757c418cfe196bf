"""How processes that compute on a CPU get memory; importing this costs no ray."""

# glibc gives large tensors back to the kernel when they are freed; the next is zeroed page by page: an eighth of the
# CPU-seconds of a step of SmolLM2-135M. So it keeps what it has; who sleeps gives it back
# (`slimefsdp.distributed.memory_manager.give_back_free_memory`). One arena, since others cannot hold tensors of more
# than 64 MiB, and an engine is called by several threads.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}
"""Variables of their environment."""
