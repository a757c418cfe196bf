"""Replacing lost ranks: the call log, and how a group is brought back; losses are noticed in actors.workers."""
