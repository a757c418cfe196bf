"""RolloutBatch: its fields, how samples become one, and its file. Numpy only."""
