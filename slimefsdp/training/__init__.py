"""A train step: what is decided about its batch before any rank works, and what each rank does then."""
