"""Messages and services of Sluice, version 1, generated from the protos beside this file."""
