"""What answers for one member: chains over hosted or embedded models, and the label scorer."""
