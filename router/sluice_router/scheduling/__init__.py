"""The data plane: admits requests, places them, moves them, and survives the loss of engines."""
