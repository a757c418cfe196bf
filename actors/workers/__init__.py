"""Ranks as Ray actors: the group, its calls, futures that notice a dead rank, the watchdog that notices a hung rank."""
