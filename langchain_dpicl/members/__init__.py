"""The chains that answer for one member: chains over hosted or embedded models, and the label scorer."""
