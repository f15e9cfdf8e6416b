"""The checks, a subject each; importing a module registers its claims."""
