"""`python -m nnmpi.generate`: what a trained language model writes after a prompt, on any number of ranks."""
