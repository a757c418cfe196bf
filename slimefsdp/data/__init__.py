"""From rollout samples to packs: numpy until the pack, no process group anywhere."""
