"""The modules that are sharded, and how a Hugging Face folder becomes them."""
