"""Streams that their clients may go on with after the connection, or its router, was lost."""
