"""Makes training samples: prompts, rewards, environments and filters."""
