"""What each rank does in a train step: packs, metrics, the reference model, checkpoints."""
