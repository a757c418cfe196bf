"""What a run shows of itself: metrics log, progress table, curves, profiles, comparison of replicas."""
