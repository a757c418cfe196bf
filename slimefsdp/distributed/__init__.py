"""Process groups and the mesh, FSDP2, activation checkpointing, offloading, agreement over ranks."""
