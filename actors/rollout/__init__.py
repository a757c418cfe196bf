"""Where samples come from: prompts, the embedded engine, rewards and filters."""
