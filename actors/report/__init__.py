"""Writes the report of runs: one HTML page, which needs neither a server nor a network."""
