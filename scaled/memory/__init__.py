"""How much memory training takes, by phase and by item, from shapes alone: no GPU and no weights."""
