"""Answers that another router began: found at the engines, and gone on with here."""
