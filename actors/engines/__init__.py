"""Engines that sample, in runs and for the service: the embedded engine, and engines with a server such as vLLM's."""
