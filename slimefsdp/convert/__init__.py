"""Checkpoints of other formats and of other meshes, read and written without a process group."""
