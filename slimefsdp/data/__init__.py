"""RolloutBatch: its fields, its construction from samples, and its file format. Numpy only."""
