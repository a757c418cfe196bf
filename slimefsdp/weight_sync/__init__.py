"""Sends the actor's weights to engines: gathers them, sends them in buckets, receives and commits them."""
