"""Observes a run: metrics log, progress table, curves, profiles, comparison of replicas."""
