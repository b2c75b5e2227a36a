"""One release: the order of its steps, the three sealed classes, and what is built on them."""
