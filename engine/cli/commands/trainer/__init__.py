"""verl's module names, for its command lines: the programs beside this room, as verl has them."""
