"""What a local cluster does next: what shall run, the next step towards it, and whether a roll goes on."""
