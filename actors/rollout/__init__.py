"""Where samples come from: the embedded engine, its rewards, and adapters."""
