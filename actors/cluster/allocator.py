"""Environment variables for the memory of processes that compute on a CPU; importing this does not import ray."""

# glibc returns large freed tensors to the kernel, and the next ones are zeroed page by page, which costs an eighth of
# the CPU time of a step of SmolLM2-135M. These settings keep the memory; a sleep returns it to the kernel
# (`slimefsdp.distributed.memory_manager.give_back_free_memory`). There is one arena, since others cannot hold tensors
# above 64 MiB, and several threads call an engine.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}
