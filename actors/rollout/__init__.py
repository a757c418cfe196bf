"""Where samples come from: prompts, rewards, environments and filters."""
