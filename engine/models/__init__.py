"""Models: one decoder, and the readers of the files it is made from."""
