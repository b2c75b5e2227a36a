"""One call of a member: its clock, its thread, its requests to a model, and its end."""
