"""What is released once: it is charged when it is made, and everything computed from it later costs nothing."""
