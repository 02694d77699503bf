"""`python -m nnmpi.verify`: whether a model under a layout trains as it does on one rank."""
