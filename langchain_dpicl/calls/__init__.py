"""One call of a member: its clock, its thread, its requests to a model, and what of it can be ended."""
