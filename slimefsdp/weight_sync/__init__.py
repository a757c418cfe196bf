"""The actor's weights on their way to engines: gathered, sent in buckets, received and committed."""
