"""Sends the actor's weights to engines: gathers, sends in buckets, receives and commits them."""
