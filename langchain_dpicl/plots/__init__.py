"""Every figure of the package, in one style."""
